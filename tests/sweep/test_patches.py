"""What stands in for other people's attributes, and how it goes."""

from __future__ import annotations

from types import SimpleNamespace

from lowprec_callback.sweep.patches import Patches


class Owner:
    def step(self) -> str:
        return "class"


def test_what_was_there_is_put_back() -> None:
    owner, own = Owner(), SimpleNamespace(step="own")
    patches = Patches()
    patches.put(owner, "step", lambda: "ours")
    patches.put(own, "step", "ours")
    patches.put(own, "step", "ours again")
    assert owner.step() == "ours"
    patches.undo()
    patches.undo()
    assert vars(owner) == {}
    assert owner.step() == "class"
    assert own.step == "own"


def test_what_somebody_has_put_over_ours_stays() -> None:
    owner, patches = Owner(), Patches()
    patches.put(owner, "step", lambda: "ours")
    inner = owner.step
    owner.step = lambda: f"theirs over {inner()}"  # type: ignore[method-assign]
    patches.undo()
    assert owner.step() == "theirs over ours"
