from tff_pdp.runtime.run_key import RunKey


def test_seeds_differ_by_round_and_client_and_key():
    key = RunKey.from_test_seed(1)
    seeds = {tuple(key.client_seed(number, client)) for number in range(20) for client in ("a", "b", "1", "11")}
    assert len(seeds) == 80
    assert tuple(RunKey.from_test_seed(2).client_seed(0, "a")) != tuple(key.client_seed(0, "a"))


def test_entropy_gives_a_new_key_each_time_and_never_shows_it():
    first, second = RunKey.from_entropy(), RunKey.from_entropy()
    assert first.secret != second.secret
    assert not first.is_test_only
    assert first.secret.hex() not in repr(first)
    assert repr(first.secret) not in repr(first)
