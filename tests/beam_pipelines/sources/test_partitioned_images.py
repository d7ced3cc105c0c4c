"""Clients made of pooled images: classes, Dirichlet mixes and uniform draws, the same on both sides."""

import hashlib

import numpy as np
import pytest

from beam_pipelines.sources.cifar import read_cifar10
from beam_pipelines.sources.divided import ByClasses, Partition, Uniform, partitioned_images
from beam_pipelines.sources.images import ImageDataset, Images
from tests.rounding import standard_errors
from tff_pdp.errors import ConfigError
from tff_pdp.settings import read_settings


def numbered(count, num_classes=10):
    """Images that tell their number, the classes in turn."""
    numbers = np.arange(count, dtype=np.uint32)
    x = np.zeros((count, 1, 4, 1), np.uint8)
    x[:, 0, :, 0] = numbers[:, np.newaxis].view(np.uint8).reshape(count, 4)
    return Images(x, numbers.astype(np.int64) % num_classes)


def make(train, test, partition, num_clients, seed=0, num_classes=10, shrink=1, divided=(), **options):
    dataset = ImageDataset(numbered(train, num_classes), numbered(test, num_classes), num_classes, origin=[])
    content = {"kind": partition, "num_clients": num_clients, **options}
    how = read_settings(Partition, content, "experiment.yaml", "data.partition")
    return list(partitioned_images(dataset, how, shrink, seed, **dict(divided)))


def numbers_of(client, is_test):
    return np.ascontiguousarray(client.x[client.is_test == is_test]).reshape(-1, 4).view(np.uint32).ravel()


def digest(clients):
    """Of names, images, labels and sides, in order."""
    sha = hashlib.sha256()
    for client in clients:
        for content in (client.name.encode(), client.x, client.y.astype("<i8"), client.is_test):
            sha.update(np.ascontiguousarray(content).tobytes() if isinstance(content, np.ndarray) else content)
    return sha.hexdigest()


CLIENTS = {
    "classes": {"num_clients": 30, "classes_per_client": 5},
    "dirichlet": {"num_clients": 30, "concentration": 0.3},
    "dirichlet_unequal": {"num_clients": 30, "concentration": 0.3},
    "shards": {"num_clients": 30, "shards_per_client": 2},
    "uniform": {"num_clients": 30},
}


@pytest.fixture(scope="module")
def made():
    return {partition: make(50_000, 10_000, partition, **options) for partition, options in CLIENTS.items()}


@pytest.mark.parametrize("partition", CLIENTS)
def test_every_image_is_in_one_client_with_its_label(made, partition):
    clients = made[partition]
    assert [client.name for client in clients] == [f"silo_{number:03d}" for number in range(30)]
    for is_test, count in ((False, 50_000), (True, 10_000)):
        numbers = np.concatenate([numbers_of(client, is_test) for client in clients])
        assert sorted(numbers) == list(range(count))
        labels = np.concatenate([client.y[client.is_test == is_test] for client in clients])
        np.testing.assert_array_equal(labels, numbers % 10)


def counts_of(client):
    return [np.bincount(client.y[client.is_test == is_test], minlength=10) for is_test in (False, True)]


def test_each_client_has_five_classes_in_the_same_shares_on_both_sides(made):
    for client in made["classes"]:
        train, test = counts_of(client)
        assert (train > 0).sum() == 5
        # 5,000 and 1,000 images of a class: the same share of both, up to a whole image.
        assert (np.abs(train / 5 - test) < 1.3).all()


def test_sizes_are_those_of_the_paper(made):
    """Liu et al. report 1,515 to 1,839 training examples; other draws of the same kind come close."""
    sizes = [(~client.is_test).sum() for client in made["classes"]]
    assert sum(sizes) == 50_000 and 1450 < min(sizes) < 1580 and 1750 < max(sizes) < 1890


@pytest.mark.parametrize(
    ("train", "test", "num_clients", "classes_per_client", "seed", "expected"),
    [
        (50_000, 10_000, 30, 5, 0, "008c577b3691f90868c95edc6bdb365ed56e8cff5e3ad3dc1b2b3f71abd22da5"),
        (50_000, 10_000, 10, 5, 3, "e143a475b65a2aa87f5385fe151163471091219b34f7b4d00a99e30055e61f9c"),
        (500, 100, 10, 3, 1, "6057aa9347981106b65bc9978a09128e5d3ad03092f7d86e92e8253de815ac54"),
    ],
)
def test_clients_of_published_results_stay_as_they_are(train, test, num_clients, classes_per_client, seed, expected):
    """docs/reproduction.md has results on heterogeneous CIFAR-10; other clients would not give them again."""
    assert digest(make(train, test, "classes", num_clients, seed, classes_per_client=classes_per_client)) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((50_000, 10_000, "dirichlet", 30, 0, 0.3), "33516aae4157905cf62e60af944aea255a163fc540a78b46002e25f421d58b52"),
        ((500, 101, "dirichlet", 7, 3, 0.1), "779d41793301ed8bfd6fe3a63086d470d6dc184930ab416de09ea04ec67d17f4"),
        ((50_000, 10_000, "uniform", 30, 0), "a9316f2419428c3ab2f0f9dd952caa506a31a3532d79a097269a4b50cb205add"),
        ((503, 101, "uniform", 7, 3), "ad12706575c5efa8d39bcfc81f4bb24b496e73554d13cf7b83f45b4207c5f030"),
    ],
)
def test_other_partitions_stay_as_they_are_too(arguments, expected):
    options = {"concentration": arguments[5]} if len(arguments) > 5 else {}
    assert digest(make(*arguments[:5], **options)) == expected


def test_real_images_stay_with_their_clients(real_data):
    cifar10 = read_cifar10(str(real_data / "cifar10" / "cifar-10-python-subset.tar.gz"))
    clients = partitioned_images(cifar10, ByClasses(num_clients=30, classes_per_client=5), shrink=1, seed=0)
    assert digest(clients) == "93fdf6b3fc936fd540a23fd0a3779076f753eccff566370cd7ad9d66a3c9d369"


def test_dirichlet_clients_are_equally_large_and_alike_on_both_sides(made):
    for client in made["dirichlet"]:
        assert (~client.is_test).sum() in (1666, 1667) and client.is_test.sum() in (333, 334)
    # The first client finds every class whole, so it has its own mix on both sides: they differ by sampling only.
    train, test = counts_of(made["dirichlet"][0])
    variance = 0.25 * (1 / train.sum() + 1 / test.sum())
    assert np.abs(train / train.sum() - test / test.sum()).max() < standard_errors(10, 1e-3) * np.sqrt(variance)


def test_concentration_decides_how_alike_dirichlet_clients_are():
    largest = {
        concentration: np.mean(
            [
                counts_of(client)[0].max() / (~client.is_test).sum()
                for client in make(5000, 1000, "dirichlet", 20, concentration=concentration)
            ]
        )
        for concentration in (0.01, 1.0, 1000.0)
    }
    assert largest[0.01] > 0.8 and 0.2 < largest[1.0] < 0.5 and largest[1000.0] < 0.16


def test_unequal_dirichlet_clients_have_the_same_shares_on_both_sides(made):
    sizes = [(~client.is_test).sum() for client in made["dirichlet_unequal"]]
    assert min(sizes) >= 10 and max(sizes) > 3 * min(sizes)
    for client in made["dirichlet_unequal"]:
        train, test = counts_of(client)
        # 5,000 and 1,000 images of a class: the same share of both, up to a whole image.
        assert (np.abs(train / 5 - test) < 1.3).all()


TWO = {"shards_per_client": 2}


def test_clients_with_two_shards_have_the_classes_of_their_shards_on_both_sides(made):
    """Ten classes of equal size make 60 shards of one class each, or 14 shards of two classes at most."""
    for clients, most, each in ((made["shards"], 2, 50_000 / 30), (make(7000, 700, "shards", 7, **TWO), 4, 1000)):
        for client in clients:
            train, test = counts_of(client)
            assert abs(train.sum() - each) <= 2 and 1 <= (train > 0).sum() <= most
            # A shard of the test images has the same share of each class, up to a whole image.
            assert (np.abs(train * test.sum() / train.sum() - test) <= 2).all()
    # Ten shards of 120 images each, of 24,000: as many classes as chance makes of them.
    clients = make(60_000, 10_000, "shards", 20, shards_per_client=10, divided={"images_per_client": 1200})
    classes = [(counts_of(client)[0] > 0).sum() for client in clients]
    assert min(classes) >= 4 and max(classes) <= 10 and len(set(classes)) > 2


@pytest.mark.parametrize("partition", ["dirichlet", "shards", "uniform"])
def test_each_client_has_exactly_as_many_images_as_asked(partition):
    clients = make(5000, 1000, partition, divided={"images_per_client": 40}, **CLIENTS[partition])
    numbers = np.concatenate([numbers_of(client, False) for client in clients])
    assert all((~client.is_test).sum() == 40 for client in clients)
    # Drawn from all images, each at most once.
    assert len(set(numbers)) == 1200 and numbers.max() > 4800
    labels = np.concatenate([client.y[~client.is_test] for client in clients])
    np.testing.assert_array_equal(labels, numbers % 10)
    assert sorted(np.concatenate([numbers_of(client, True) for client in clients])) == list(range(1000))
    everything = make(1200, 1000, partition, divided={"images_per_client": 40}, **CLIENTS[partition])
    # Where all images are asked for, they are divided as without a number.
    assert digest(everything) == digest(make(1200, 1000, partition, **CLIENTS[partition]))


@pytest.mark.parametrize("partition", ["classes", "dirichlet_unequal"])
def test_clients_of_unequal_size_share_as_many_images_as_asked(partition):
    clients = make(5000, 1000, partition, divided={"training_images": 900}, **CLIENTS[partition])
    numbers = np.concatenate([numbers_of(client, False) for client in clients])
    # Drawn from all images, each at most once.
    assert len(numbers) == len(set(numbers)) == 900 and numbers.max() > 4500
    labels = np.concatenate([client.y[~client.is_test] for client in clients])
    np.testing.assert_array_equal(labels, numbers % 10)
    assert sorted(np.concatenate([numbers_of(client, True) for client in clients])) == list(range(1000))
    everything = make(900, 1000, partition, divided={"training_images": 900}, **CLIENTS[partition])
    assert digest(everything) == digest(make(900, 1000, partition, **CLIENTS[partition]))


@pytest.mark.parametrize("partition", CLIENTS)
def test_uniform_test_images(partition):
    """Each test image is in one client: a shared model's accuracy over all of them is that on the official images."""
    same, uniform = (
        make(5000, 1001, partition, divided={"test_partition": how}, **CLIENTS[partition])
        for how in ("same", "uniform")
    )
    for one, other in zip(same, uniform, strict=True):
        np.testing.assert_array_equal(numbers_of(one, False), numbers_of(other, False))
        assert other.is_test.sum() in (33, 34)
    assert sorted(np.concatenate([numbers_of(client, True) for client in uniform])) == list(range(1001))
    # On average 3.3 of 33 test images are of a class, whatever the client's own classes are.
    assert max(counts_of(client)[1].max() for client in uniform) <= 12


def test_uniform_clients_have_every_class(made):
    for client in made["uniform"]:
        train, test = counts_of(client)
        # Of 1,667 draws without replacement, 167 of a class on average, with a standard deviation of 12.
        assert abs(train - 166.7).max() < 60 and test.sum() in (333, 334)


@pytest.mark.parametrize("partition", CLIENTS)
def test_the_seed_decides(partition):
    options = {**CLIENTS[partition], "num_clients": 10}
    digests = [digest(make(500, 100, partition, seed=seed, **options)) for seed in (0, 0, 1)]
    assert digests[0] == digests[1] != digests[2]


def test_other_numbers_of_classes_and_many_clients():
    clients = make(4000, 400, "classes", 1500, num_classes=100, classes_per_client=2)
    assert clients[7].name == "silo_0007" and all(len(set(client.y)) <= 2 for client in clients)


def test_shrunk():
    images = Images(np.arange(32, dtype=np.uint8).reshape(2, 4, 4, 1), np.array([0, 1]))
    dataset = ImageDataset(images, images, 2, origin=[])
    (client,) = partitioned_images(dataset, Uniform(num_clients=1), shrink=2, seed=0)
    # Means of the first image's squares: 2.5, 4.5, 10.5 and 12.5, rounded to even.
    assert client.x.shape == (4, 2, 2, 1) and client.x[0, ..., 0].tolist() == [[2, 4], [10, 12]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"partition": "sizes"},
            "data.partition.kind must be one of classes, dirichlet, dirichlet_unequal, shards, uniform, not 'sizes'",
        ),
        ({"partition": "shards"}, "missing key data.partition.shards_per_client: a whole number of at least 1"),
        (
            {"partition": "shards", "shards_per_client": 26},
            "data.partition: 4 clients with 26 shards each need 104 training images, but there are 100; lower ",
        ),
        (
            {"partition": "uniform", "divided": {"images_per_client": 26}},
            "data.images_per_client: 4 clients with 26 images each need 104 training images, but there are 100; lower ",
        ),
        (
            {"partition": "dirichlet_unequal", "concentration": 0.5, "min_images": 26},
            "data.partition.min_images: 100 training images could not be divided among 4 clients with at least 26 each "
            "at concentration 0.5; raise concentration, or lower num_clients or min_images",
        ),
        ({"partition": "classes"}, "missing key data.partition.classes_per_client: a whole number of at least 1"),
        ({"partition": "dirichlet"}, "missing key data.partition.concentration: a number above 0"),
        (
            {"partition": "uniform", "concentration": 0.1},
            "unknown key data.partition.concentration; known: num_clients",
        ),
        (
            {"partition": "dirichlet", "concentration": 0.1, "classes_per_client": 2},
            "unknown key data.partition.classes_per_client; known: concentration, num_clients",
        ),
        (
            {"partition": "dirichlet", "concentration": 0.0},
            r"data.partition.concentration must be a number above 0, not 0\.0",
        ),
        (
            {"partition": "dirichlet", "concentration": float("nan")},
            "data.partition.concentration must be a number above 0, not nan",
        ),
        (
            {"partition": "dirichlet", "concentration": float("inf")},
            "data.partition.concentration must be a number above 0, not inf",
        ),
        (
            {"partition": "uniform", "num_clients": 0},
            "data.partition.num_clients must be a whole .* of at least 1, not 0",
        ),
        ({"partition": "uniform", "num_clients": 101}, "100 training images cannot be divided among 101 clients"),
        (
            {"partition": "classes", "classes_per_client": 5, "divided": {"training_images": 101}},
            "data.training_images: 101 training images are wanted, but there are 100; lower training_images",
        ),
        ({"partition": "classes", "classes_per_client": 5, "num_clients": 3}, "3 clients with 5 of 10 classes"),
        ({"partition": "classes", "classes_per_client": 20, "num_clients": 3}, "3 clients with 20 of 10 classes"),
        (
            {"partition": "classes", "classes_per_client": 0},
            "data.partition.classes_per_client must be a whole number of at least 1, not 0",
        ),
    ],
)
def test_options_out_of_range(arguments, message):
    with pytest.raises(ConfigError, match=message):
        make(100, 20, **{"num_clients": 4, **arguments})
