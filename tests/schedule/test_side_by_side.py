"""Instances of a stage whose ranks act as one rank run at the same time."""

from __future__ import annotations

from lightning_mm5d.schedule import Action, Graph, Kind, Node, build, side_by_side, validate

COUNT = 4


def graph(*, encoder_before: bool = False) -> Graph:
    """An encoder with two instances on the ranks that rank 0 stands for, where the language model runs too."""

    def node(stage: str, rank: int) -> Node:
        return Node(
            stage=stage,
            rank=rank,
            microbatches=tuple(range(COUNT)),
            forward_cost=1.0,
            backward_cost=2.0,
            weight_cost=1.0,
        )

    if not encoder_before:
        return Graph((node("vision.0", 0), node("language.0", 0)), (("vision.0", "language.0"),))
    nodes = (node("vision.0", 1), node("vision.1", 0), node("language.0", 0))
    return Graph(nodes, (("vision.0", "vision.1"), ("vision.1", "language.0")))


def places(actions: list[Action], kind: Kind, stage: str) -> list[int]:
    return [index for index, action in enumerate(actions) if action.kind is kind and action.stage == stage]


def test_forwards_of_two_instances_follow_each_other_and_so_do_backwards() -> None:
    made = side_by_side(build("1f1b", graph()), graph(), {"vision.0": 2})
    validate(made, graph())
    for kind in (Kind.F, Kind.B):
        first, second, third, fourth = places(made[0], kind, "vision.0")
        assert (second - first, fourth - third) == (1, 1)


def test_other_stages_keep_their_order() -> None:
    before = build("1f1b", graph())
    after = side_by_side(before, graph(), {"vision.0": 2})
    assert [a for a in after[0] if a.stage == "language.0"] == [a for a in before[0] if a.stage == "language.0"]


def test_an_input_gradient_stays_before_its_weight_gradient() -> None:
    for schedule in ("zero_bubble", "auto"):
        made = side_by_side(build(schedule, graph(encoder_before=True)), graph(encoder_before=True), {"vision.1": 2})
        validate(made, graph(encoder_before=True))


def test_evaluation_moves_forwards_only() -> None:
    made = side_by_side(build("1f1b", graph(), forward_only=True), graph(), {"vision.0": 2}, forward_only=True)
    assert [str(action) for action in made[0][:3]] == ["F(vision.0, 0)", "F(vision.0, 1)", "F(language.0, 0)"]


def test_without_instances_side_by_side_nothing_changes() -> None:
    before = build("1f1b", graph())
    assert side_by_side(before, graph(), {}) == before
