"""The tables of docs/fleet.md have the figures of the recorded runs."""

import json

from benchmarks.common.every import table
from tests.meta.source import ROOT

TEXT = (ROOT / "docs" / "fleet.md").read_text()


def figures(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["figures"]


def rows() -> list[str]:
    """Return the rows of the table, as the records have them."""
    every, faults, ray = (figures(name) for name in ("chaos_every", "chaos_faults", "chaos_ray"))
    stop = figures("chaos_stop")
    moved = f"{every['moved']:,.0f} sequences moved by {every['kills']} kills"
    refused = f"{every['refused']} new requests refused with 503"
    met = f"{every['positions_met']:,} of {every['positions']:,} tokens of {every['requests']} requests"
    left = f"{faults['hung']} clients hung, {faults['held']} blocks held, {faults['processes_left']} processes left"
    rate = f"{ray['through']['items_per_s']} items/s through the ingress"
    cells = [
        (f"kill -9 at {met}", every["answers"],
         every["differing"], f"{moved}; p99 of the pauses {every['pause_p99_s']:.1f} s; {refused}"),
        (f"SIGSTOP {stop['kills']} times under {stop['requests']} requests", stop["answers"], stop["differing"],
         f"{stop['moved']:,.0f} sequences moved; p99 of the pauses {stop['pause_p99_s']:.1f} s, 1.5 to notice"),
        (f"{faults['faults']:,} faults of {len(faults['by_fault'])} kinds", faults["answers"], faults["differing"],
         f"{left}; {faults['cut_by_a_killed_server']} answers cut by a killed server"),
        (f"a replica of Ray Serve is killed under {ray['requests']} requests", ray["requests"], len(ray["differing"]),
         f"longest pause {ray['longest_pause_s']:.1f} s; {rate}"),
    ]  # fmt: skip
    return [f"| {run} | {answers:,} | {differ} | {more} |" for run, answers, differ, more in cells]


def test_the_table_has_the_recorded_figures() -> None:
    for row in rows():
        assert row in TEXT, row


def test_the_parts_of_the_pauses_are_those_of_the_record() -> None:
    pauses = figures("chaos_pauses")
    assert table(pauses) in TEXT
    within = f"In {pauses['within_bound']} of {pauses['kills_with_requests']} kills"
    reading = f"{pauses['read_tokens_p50']:,} tokens in {pauses['read_cpu_p50_s']:.2f} s of the processor"
    waited = f"Clients waited {pauses['pause_p99_s']:.2f} s"
    for said in (
        waited,
        within,
        reading,
        f"{pauses['first_token_p99_s']:.1f} s",
        f"a step took {pauses['step_s']:.2f} s",
    ):
        assert said in TEXT, said
