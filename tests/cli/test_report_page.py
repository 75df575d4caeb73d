"""The report page: escaping, well-formedness and finite drawings, whatever the input; and its sums and sentences."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from html.parser import HTMLParser
from itertools import combinations, pairwise

import pytest

from orchestrator.cli.report_page import (
    SAMPLES_FACT,
    SUMMARY_HEADERS,
    Check,
    GenerationSpan,
    Interruption,
    LossPoint,
    Report,
    TimelineEvent,
    headline,
    render,
    summary_rows,
)
from orchestrator.cli.report_page.labels import Label, place_labels
from orchestrator.cli.report_page.marks import MARK_STYLES
from orchestrator.cli.report_page.scales import scale_over, ticks, time_step

VOID_ELEMENTS = {"meta"}
NUMBERS_IN = ("x", "y", "width", "height", "rx", "r", "cx", "cy", "viewbox")
SURVIVORS = ("node-0", "node-1")

EMPTY = Report(
    title="demo",
    subtitle="",
    events=(),
    generations=(),
    losses=(),
    reference_losses=(),
    interruptions=(),
    checks=(),
    facts=(),
)


class Page(HTMLParser):
    """Reads a page strictly: every element closed in order, every id once, every coordinate finite."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []
        ids = [attributes["id"] for _, attributes in self.elements if "id" in attributes]
        assert len(ids) == len(set(ids))
        for _, attributes in self.elements:
            self.check_coordinates(attributes)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs)
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID_ELEMENTS:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @staticmethod
    def check_coordinates(attributes: dict[str, str]) -> None:
        for name in NUMBERS_IN:
            for number in attributes.get(name, "").split():
                assert math.isfinite(float(number)), (name, attributes)
        assert float(attributes.get("width", 0)) >= 0
        for name, allowed in (("d", "MLHVZh"), ("transform", "translate()rotate")):
            for number in re.split(rf"[{allowed}\s]+", attributes.get(name, "")):
                assert not number or math.isfinite(float(number)), (name, attributes)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def of_class(self, name: str) -> list[tuple[str, dict[str, str]]]:
        return [each for each in self.elements if name in each[1].get("class", "").split()]


def event(
    kind: str, seconds: float, *, node: str | None = None, step: int | None = None, reason: str = ""
) -> TimelineEvent:
    return TimelineEvent(time_seconds=seconds, kind=kind, reason=reason, node=node, generation=1, step=step)


def interruption(*, cause: str = "node lost", node: str | None = "node-2", at_seconds: float = 30.0) -> Interruption:
    return Interruption(
        cause=cause,
        node=node,
        at_seconds=at_seconds,
        notice_to_commit_seconds=None,
        failure_to_first_step_seconds=7.25,
        steps_lost=4,
        seconds_lost=9.5,
    )


def realistic() -> Report:
    """Three nodes, one of which is lost at 30 s; steps 17 to 20 are done twice, then two nodes finish 40 steps."""
    reference = tuple(LossPoint(step=step, loss=4 / step + 1, generation=1) for step in range(1, 41))
    first = reference[:20]
    second = tuple(dataclasses.replace(point, generation=2) for point in reference[16:])
    return Report(
        title="demo",
        subtitle="three local nodes",
        events=(
            event("node joined", 0.1, node="node-0", reason="agent connected"),
            event("first good step", 5.0, step=1, reason="fresh start"),
            event("committed", 12.0, step=8, reason="all receipts are there"),
            event("committed", 25.0, step=16, reason="all receipts are there"),
            event("node lost", 30.0, node="node-2", step=20, reason="no heartbeat for 5 s"),
            event("worker exited", 30.2, node="node-0", step=20, reason="its generation is over"),
            event("first good step", 37.25, step=17, reason="remapped from 3 to 2"),
            event("committed", 60.0, step=40, reason="all receipts are there"),
        ),
        generations=(
            GenerationSpan(
                generation=1,
                world_size=3,
                nodes=(*SURVIVORS, "node-2"),
                start_seconds=0.5,
                first_step_seconds=5.0,
                end_seconds=30.2,
            ),
            GenerationSpan(
                generation=2,
                world_size=2,
                nodes=SURVIVORS,
                start_seconds=31.0,
                first_step_seconds=37.25,
                end_seconds=60.0,
            ),
        ),
        losses=first + second,
        reference_losses=reference,
        interruptions=(interruption(),),
        checks=(Check(name="Every sample once.", passed=True, detail="320 of 320"),),
        facts=((SAMPLES_FACT, "0"), ("goodput", "81 %")),
    )


class TestWords:
    def test_headline_counts_steps_interruptions_and_samples(self) -> None:
        assert headline(realistic()) == "40 steps, 1 interruption, 0 samples lost or repeated"

    def test_headline_says_nothing_of_samples_that_nobody_counted(self) -> None:
        assert headline(dataclasses.replace(realistic(), facts=())) == "40 steps, 1 interruption"

    def test_without_losses_an_agreed_step_does_not_count_as_reached(self) -> None:
        events = (event("committed", 1.0, step=7), event("step agreed", 2.0, step=9))
        assert headline(dataclasses.replace(EMPTY, events=events)) == "7 steps, 0 interruptions"

    def test_summary_rows_stand_under_their_headers(self) -> None:
        (row,) = summary_rows([interruption()])
        assert dict(zip(SUMMARY_HEADERS, row, strict=True)) == {
            "#": "1",
            "cause": "node lost",
            "node": "node-2",
            "at (s)": "30.0",
            "notice to commit (s)": "–",
            "failure to first step (s)": "7.25",
            "steps lost": "4",
            "time lost (s)": "9.50",
        }

    def test_a_failed_check_is_said_in_words(self) -> None:
        checks = (Check(name="one", passed=True, detail=""), Check(name="two", passed=False, detail="off by 3"))
        text = Page(render(dataclasses.replace(EMPTY, checks=checks))).text
        assert "1 of 2 checks failed." in text
        assert "✗ failed two off by 3" in text
        assert "✓ passed one" in text

    def test_equal_losses_are_called_equal_and_others_measured(self) -> None:
        report = realistic()
        assert "to the last bit, at all 40 steps compared" in Page(render(report)).text
        last = report.losses[-1]
        losses = (*report.losses[:-1], dataclasses.replace(last, loss=last.loss + 0.25))
        text = Page(render(dataclasses.replace(report, losses=losses))).text
        assert "Largest difference from the uninterrupted reference: 0.25 at step 40" in text

    def test_a_loss_that_is_not_a_number_never_passes_for_a_small_difference(self) -> None:
        report = realistic()
        losses = (dataclasses.replace(report.losses[0], loss=math.nan), *report.losses[1:])
        assert "reference: inf at step 1" in Page(render(dataclasses.replace(report, losses=losses))).text


class TestDrawing:
    def test_realistic_report(self) -> None:
        page = Page(render(realistic()))
        assert len(page.of_class("lane")) == 4, "the job and three nodes"
        assert len([tag for tag, _ in page.of_class("hatch")]) == 5 + 1, (
            "a start per node and generation, and the legend"
        )
        assert len(page.of_class("first-good-step")) == 2 + 1
        assert len(page.of_class("badge")) == 2, "the interruption, in the timeline and over the losses"
        assert [attributes["class"] for _, attributes in page.of_class("curve")][:3] == [
            "curve reference",
            "curve tone0",
            "curve tone1",
        ]
        assert "generation 1 · world size 3" in page.text
        assert "remapped from 3 to 2" in page.text

    @pytest.mark.parametrize("section", ["Timeline", "Loss", "Interruptions", "Events"])
    def test_empty_input_gives_every_section_with_a_sentence(self, section: str) -> None:
        page = Page(render(EMPTY))
        assert section in page.words
        assert not page.of_class("curve")

    def test_one_event(self) -> None:
        page = Page(render(dataclasses.replace(EMPTY, events=(event("committed", 3.0, step=4),))))
        assert "commit 4" in page.text

    def test_one_loss(self) -> None:
        page = Page(render(dataclasses.replace(EMPTY, losses=(LossPoint(step=4, loss=2.0, generation=1),))))
        assert len([a for _, a in page.of_class("curve") if a["d"].endswith("h2")]) == 1

    def test_a_loss_that_cannot_be_drawn_breaks_the_line(self) -> None:
        losses = tuple(LossPoint(step=s, loss=math.inf if s == 5 else 1.0 * s, generation=1) for s in range(1, 10))
        curve, _legend = (a["d"] for _, a in Page(render(dataclasses.replace(EMPTY, losses=losses))).of_class("curve"))
        assert curve.count("M") == 2

    def test_many_losses_make_a_small_page_that_keeps_the_spike(self) -> None:
        losses = tuple(LossPoint(step=s, loss=50.0 if s == 77_777 else 1.0, generation=1) for s in range(200_000))
        page = Page(render(dataclasses.replace(EMPTY, losses=losses)))
        curve = page.of_class("curve")[0][1]["d"]
        assert len(curve) < 50_000
        heights = {float(point.split()[1]) for point in re.split("[ML]", curve) if point}
        assert len(heights) == 2

    def test_a_node_may_be_called_job(self) -> None:
        page = Page(render(dataclasses.replace(EMPTY, events=(event("node lost", 1.0, node="job"),))))
        assert len(page.of_class("lane")) == 2

    def test_a_thousand_nodes_are_cut_down_to_those_with_events(self) -> None:
        nodes = tuple(f"node-{index}" for index in range(1_000))
        span = GenerationSpan(
            generation=1, world_size=1000, nodes=nodes, start_seconds=0, first_step_seconds=1, end_seconds=9
        )
        report = dataclasses.replace(EMPTY, generations=(span,), events=(event("node lost", 5.0, node="node-999"),))
        page = Page(render(report))
        assert len(page.of_class("lane")) == 65
        assert "node-999" in page.words
        assert "936 more nodes not drawn" in page.text

    def test_many_interruptions_share_badges_but_all_are_numbered(self) -> None:
        many = tuple(interruption(at_seconds=10.0 + index / 10) for index in range(50))
        text = Page(render(dataclasses.replace(realistic(), interruptions=many))).text
        assert re.search(r"\b1–\d+\b", text)


class TestLabels:
    @pytest.mark.parametrize("seed", range(20))
    def test_no_label_lies_on_another_on_a_mark_or_on_a_leader(self, seed: int) -> None:
        rng = random.Random(seed)
        marks = [rng.uniform(100, 1000) for _ in range(rng.randrange(1, 60))]
        labels = [
            Label(x=x, before=-9, after=rng.uniform(20, 120), rank=rng.randrange(3), text="", title="") for x in marks
        ]
        spots = place_labels(labels, rows_max=3, left=90, right=1080, marks=marks)
        assert spots
        for one, other in combinations(spots, 2):
            if one.row == other.row:
                assert one.end < other.start or other.end < one.start
            upper, lower = (one, other) if one.row < other.row else (other, one)
            assert one.row == other.row or not upper.start < lower.label.x < upper.end
        for spot in spots:
            assert 90 <= spot.start < spot.end <= 1080
            assert spot.row or not any(spot.start < x < spot.end for x in marks)

    @pytest.mark.parametrize("spread", [1e-9, 0.03, 1.0, 7.3, 59.0, 61.0, 4_000.0, 90_000.0, 1e7, 1e12])
    def test_ticks_are_even_few_and_within_the_scale(self, spread: float) -> None:
        scale = scale_over([0.0, spread], start=0, end=1000)
        step = time_step(scale.high - scale.low, 10)
        found = ticks(scale, step)
        assert 2 <= len(found) <= 11
        assert all(later - earlier == pytest.approx(step) for earlier, later in pairwise(found))


HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&lt;\x00\ud800]]></style>"


class TestHostileInput:
    def test_text_never_becomes_markup(self) -> None:
        report = realistic()
        hostile = Report(
            title=HOSTILE,
            subtitle=HOSTILE,
            events=tuple(
                event(kind, 1.0 * index, node=HOSTILE, step=1, reason=HOSTILE)
                for index, kind in enumerate((*MARK_STYLES, HOSTILE))
            ),
            generations=tuple(dataclasses.replace(span, nodes=(HOSTILE,)) for span in report.generations),
            losses=report.losses,
            reference_losses=(),
            interruptions=(interruption(cause=HOSTILE, node=HOSTILE),),
            checks=(Check(name=HOSTILE, passed=False, detail=HOSTILE),),
            facts=((HOSTILE, HOSTILE), (SAMPLES_FACT, HOSTILE)),
        )
        text = render(hostile)
        page = Page(text)
        assert not {tag for tag, _ in page.elements} & {"script", "img", "iframe", "object", "link", "a"}
        assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
        assert "<script>alert(1)</script>" in page.text, "it is shown as it was written"
        text.encode()

    def test_nothing_is_loaded_from_elsewhere(self) -> None:
        text = render(realistic())
        assert "default-src 'none'" in text
        assert not re.search(r"https?:|//[a-z]|@import|src=|href=", text)

    @pytest.mark.parametrize("seed", range(40))
    def test_any_numbers_give_a_well_formed_page(self, seed: int) -> None:
        rng = random.Random(seed)
        odd = (0.0, -0.0, 1.0, -3.5, 1e-320, 1e-13, 1e9, 1e12, 1e308, -1e308, math.inf, -math.inf, math.nan)

        def number() -> float:
            return rng.choice(odd) if rng.random() < 0.4 else rng.uniform(-5, 100)

        def step() -> int:
            return rng.choice((0, 1, -7, 10**9, 10**400)) if rng.random() < 0.2 else rng.randrange(100)

        def optional() -> float | None:
            return number() if rng.random() < 0.7 else None

        def node() -> str | None:
            return rng.choice(("node-0", "node-1", "", None))

        kinds = (*MARK_STYLES, "staged")
        report = Report(
            title="",
            subtitle="",
            events=tuple(
                event(rng.choice(kinds), number(), node=node(), step=step()) for _ in range(rng.randrange(60))
            ),
            generations=tuple(
                GenerationSpan(
                    generation=rng.randrange(5),
                    world_size=rng.randrange(9),
                    nodes=("node-0", "node-0", ""),
                    start_seconds=number(),
                    first_step_seconds=optional(),
                    end_seconds=number(),
                )
                for _ in range(rng.randrange(5))
            ),
            losses=tuple(
                LossPoint(step=step(), loss=number(), generation=rng.randrange(5)) for _ in range(rng.randrange(30))
            ),
            reference_losses=tuple(
                LossPoint(step=step(), loss=number(), generation=0) for _ in range(rng.randrange(30))
            ),
            interruptions=tuple(
                dataclasses.replace(interruption(node=node(), at_seconds=number()), seconds_lost=number())
                for _ in range(rng.randrange(12))
            ),
            checks=(),
            facts=(),
        )
        Page(render(report))
