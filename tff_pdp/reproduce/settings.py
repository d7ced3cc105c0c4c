"""All experiments that `tff-pdp reproduce` knows, by name, and what is unlike their publications."""

from pathlib import Path

from tff_pdp.reports.words import USERS
from tff_pdp.reproduce.pandemic_settings import PANDEMIC_SETTINGS
from tff_pdp.reproduce.pfed_dsu_settings import PFED_DSU_SETTINGS
from tff_pdp.reproduce.setting import Scale, Setting, Variant
from tff_pdp.reproduce.silo_settings import SILO_SETTINGS
from tff_pdp.reproduce.udp_settings import UDP_SETTINGS
from tff_pdp.reproduce.user_settings import MNIST_WRITERS_SETTING

SETTINGS = {
    setting.name: setting
    for setting in (*SILO_SETTINGS, *PANDEMIC_SETTINGS, MNIST_WRITERS_SETTING, *UDP_SETTINGS, *PFED_DSU_SETTINGS)
}

_SUBSET = "data: a part of the images, {name}; {paper} has all 50,000, so {consequence}"


def deviations(setting: Setting, scale: Scale, variant: Variant, data_input: Path) -> list[str]:
    """What is unlike the publication in a run, or what else is to be known of it, one sentence each."""
    found = [*variant.deviations, *setting.deviations]
    if scale.deviation:
        found.append(scale.deviation)
    if "subset" in data_input.name:
        is_of_users = setting.clients == USERS
        consequence = "each user has fewer of them" if is_of_users else "the same ε leaves less"
        found.append(_SUBSET.format(name=data_input.name, paper=setting.paper, consequence=consequence))
    return found
