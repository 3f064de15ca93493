"""What pages say is not there is not there: `check` says the same, and so does the day on GPUs."""

import pytest

pytest.importorskip("material", reason="pip install -e '.[site]'")

from tests.site import claims


def test_pages_deny_only_what_check_denies() -> None:
    assert claims.stale(claims.pages()) == []


def test_there_are_claims_to_compare() -> None:
    found = [claim for page, text in claims.pages() for claim in claims.denied(page, text)]
    assert len({claim.subject for claim in found}) > 6 and len({claim.page for claim in found}) > 4


@pytest.mark.parametrize(
    ("says", "wrong"),
    [
        ("A feature that is not there (NVMe,\nsequence parallelism) is an error.", ["NVMe"]),
        ("* `mics_shard_size` has no effect.", ["mics_shard_size"]),
        ("| what | state |\n|---|---|\n| MiCS | not supported |", ["MiCS"]),
        ("Not here: ZenFlow, and hpZ.", ["hpZ"]),
        ("It works. `keep_last` is refused.", ["keep_last"]),
        ("ZenFlow is not supported. NVMe is.", []),
        ("`immediate_grad_update` has no effect.", []),
        ("```text\nNVMe is not supported\n```", []),
    ],
)
def test_a_stale_claim_is_noticed(says: str, wrong: list[str]) -> None:
    found = claims.stale([("page.md", f"# Title\n\n{says}\n")])
    assert len(found) == len(wrong)
    assert all(word in claim.subject for word, claim in zip(wrong, found, strict=True))


def test_no_page_says_that_gpus_have_run_nothing_once_they_have() -> None:
    day = claims.GPU.read_text()
    assert claims.STATE.search(day)
    assert claims.on_gpus(claims.pages(), day) == []


@pytest.mark.parametrize(("state", "stale"), [("not run", 0), ("done", 1)])
def test_a_page_that_is_stale_after_a_day_on_gpus_is_found(state: str, stale: int) -> None:
    day = f"| part | expected | state |\n| --- | --- | --- |\n| One | All. | {state} |\n"
    pages = [
        ("site/docs/zero_full.md", "It is fast. It has run on CPUs only."),
        ("site/docs/fit.md", "On CPUs only."),
    ]
    assert len(claims.on_gpus(pages, day)) == stale
