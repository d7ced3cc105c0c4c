"""Runs that fail before a round, as when the power goes out."""

from tff_pdp.training import train as training


def stop_before(monkeypatch, round_number):
    """Makes a training fail before a round's computation, once everything before the round is on disk."""
    real_round = training.run_round

    def failing_round(method, state, number, data):
        if number == round_number:
            raise RuntimeError("the power went out")
        return real_round(method, state, number, data)

    monkeypatch.setattr(training, "run_round", failing_round)
