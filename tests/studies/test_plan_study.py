"""The page about plans says what the plans beside it say."""

from __future__ import annotations

from pathlib import Path

from studies import plan

FOLDER = Path(__file__).parents[2] / "results" / "plan"


def test_the_page_is_made_of_the_plans_beside_it():
    plans = plan.read(FOLDER)
    assert plan.page(plans) == (FOLDER / "README.md").read_text(encoding="utf-8")
    for name, found in plans.items():
        assert found["command"] == f"python -m kvjax.plan {(plan.QUESTIONS | plan.ALONE)[name]}"
        assert found["fits"]["step"]
        # What a step needs is what it is made of, and so are its most rows.
        parts = ("weights", "learned", "allocated", "padding", "temporary", "code")
        assert found["step"]["total"] == sum(found["step"][part] for part in parts)
        assert found["at_imbalance"]["1"]["most_rows"] == found["most_rows"] >= found["rows"]
