from tff_pdp.experiment.run_key import RunKey


def test_seeds_differ_by_round_and_client_and_key():
    key = RunKey.from_test_seed(1)
    seeds = {tuple(key.client_seed(number, client)) for number in range(20) for client in ("a", "b", "1", "11")}
    assert len(seeds) == 80
    assert tuple(RunKey.from_test_seed(2).client_seed(0, "a")) != tuple(key.client_seed(0, "a"))


def test_entropy_gives_a_new_key_each_time_and_never_shows_it(keys_of_tests):
    first, second = keys_of_tests(), keys_of_tests()
    assert first.secret != second.secret
    assert not first.is_test_only
    assert first.secret.hex() not in repr(first)
    assert repr(first.secret) not in repr(first)


def test_repetitions_and_purposes_draw_from_seeds_of_their_own():
    key = RunKey.from_test_seed(1)
    seeds = {tuple(key.client_seed(number, "a", run)) for number in range(5) for run in range(5)}
    # Messages that could run together: run 1, round 1 of "a" and round 1 of "1:a".
    seeds |= {tuple(key.client_seed(1, "1:a")), tuple(key.client_seed(1, "1:a", 1))}
    assert len(seeds) == 27
    drawn = {
        key.generator(purpose, client_id, run).below(2**64)
        for purpose in ("score", "number of runs")
        for client_id in ("a", "b")
        for run in range(3)
    }
    assert len(drawn) == 12
    assert key.generator("score", "a", 2).below(2**64) in drawn
    assert RunKey.from_test_seed(2).generator("score", "a", 2).below(2**64) not in drawn
