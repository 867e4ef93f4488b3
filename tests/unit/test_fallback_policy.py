"""What a CPU fallback does: nothing, a warning, an error."""

import pytest
import torch

from adaptive_eager import FallbackError, FallbackWarning, policy
from adaptive_eager.record import TAPE


@pytest.fixture
def choose(monkeypatch):
    def set_policy(word):
        with TAPE.lock:
            TAPE.forget()
        monkeypatch.setattr(policy, "on_fallback", word)
        monkeypatch.setattr(policy, "_warned", set())

    yield set_policy
    set_policy("allow")


CASES = {
    "recorded": (lambda x: torch.special.bessel_j0(x), "bessel_j0"),
    "at once": (lambda x: torch.nonzero(x), "nonzero"),
}


@pytest.mark.parametrize("case", CASES)
def test_error_names_op_and_line_and_loses_nothing(choose, case):
    """Each call raises, at the user's line; what was pending is computed."""
    f, name = CASES[case]
    x = torch.ones(3, device="neuron")
    y = x * 2
    choose("error")
    for _ in range(2):
        with pytest.raises(
            FallbackError, match=f"{name}.*test_fallback_policy.py:.*ADAPTIVE_EAGER_FALLBACK"
        ):
            f(y)
    assert y.tolist() == [2, 2, 2]


@pytest.mark.parametrize("case", CASES)
def test_warning_once_an_op(choose, case):
    """The first call of an op warns with a type of its own, the others do not."""
    f, name = CASES[case]
    choose("warn")
    x = torch.ones(3, device="neuron")
    inputs = x, x * 2, torch.ones(4, device="neuron")
    with pytest.warns(FallbackWarning, match=name) as seen:
        [f(t) for t in inputs]
    assert len(seen) == 1


def test_reads_are_no_fallbacks(choose):
    """Reading a value, copies and ops with a kernel raise nothing."""
    choose("error")
    x = torch.ones(3, device="neuron")
    assert (x @ x).item() == 3 and torch.sort(x)[0].tolist() == [1, 1, 1]


def test_an_unknown_word_is_said(monkeypatch):
    """A value that means nothing warns and allows."""
    monkeypatch.setenv("ADAPTIVE_EAGER_FALLBACK", "never")
    with pytest.warns(UserWarning, match="never"):
        assert policy._chosen() == "allow"
