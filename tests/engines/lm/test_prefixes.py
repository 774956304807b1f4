"""Which beginnings of prompts are shared."""

from __future__ import annotations

from daskinfer.engines.lm.prefixes import BLOCK, Prefixes
from daskinfer.engines.lm.sequences import Row, Segment

COMMON = list(range(100, 100 + 4 * BLOCK))
OTHER = list(range(500, 500 + 4 * BLOCK))


def enter(prefixes: Prefixes, prompt: list[int], row: int = 0) -> tuple[Segment, ...]:
    chain = prefixes.chain(Row.of(row, prompt, 1))
    prefixes.attach(chain)
    return chain


def known(prompts: list[list[int]], **options: int) -> Prefixes:
    prefixes = Prefixes(**options)
    for prompt in prompts:
        prefixes.observe(prompt)
    return prefixes


def test_a_common_beginning_is_one_segment_for_all() -> None:
    prompts = [[*COMMON, i, i + 1] for i in range(5)]
    prefixes = known(prompts)
    chains = [enter(prefixes, prompt) for prompt in prompts]
    assert [segment.tokens for segment in chains[0]] == [COMMON]
    assert all(chain == chains[0] for chain in chains)
    assert chains[0][0].users == 5


def test_prompts_that_differ_share_nothing() -> None:
    prompts = [[i, *COMMON] for i in range(5)]
    prefixes = known(prompts)
    assert all(enter(prefixes, prompt) == () for prompt in prompts)
    assert prefixes.segments == []


def test_too_short_or_too_rare_is_not_worth_it() -> None:
    short = [[*COMMON[:BLOCK], i] for i in range(50)]
    assert enter(known(short), short[0]) == ()
    rare = [[*COMMON, i] for i in range(2)]
    assert enter(known(rare, min_saved=len(COMMON) + 1), rare[0]) == ()
    assert enter(known(rare, min_saved=len(COMMON)), rare[0]) != ()


def test_equal_prompts_keep_a_token_of_their_own() -> None:
    prompts = [list(COMMON) for _ in range(8)]
    chain = enter(known(prompts), prompts[0])
    assert sum(len(segment.tokens) for segment in chain) == len(COMMON) - BLOCK


def test_segments_form_a_tree() -> None:
    left = [[*COMMON, *OTHER, i] for i in range(6)]
    right = [[*COMMON, *OTHER[::-1], i] for i in range(6)]
    prefixes = known(left + right)
    a, b = enter(prefixes, left[0]), enter(prefixes, right[0])
    assert [len(s.tokens) for s in a] == [len(COMMON), len(OTHER)]
    assert a[0] is b[0]
    assert a[1] is not b[1]
    assert a[1].chain == (a[0],)
    assert a[1].offset == len(COMMON)


def test_a_segment_never_completed_goes_with_its_last_user_and_a_complete_one_stays() -> None:
    prompts = [[*COMMON, i] for i in range(5)]
    prefixes = known(prompts)
    chain = enter(prefixes, prompts[0])
    assert enter(prefixes, prompts[1]) == chain
    assert prefixes.detach(chain) == []
    assert prefixes.detach(chain) == list(chain)
    assert prefixes.segments == []
    chain = enter(prefixes, prompts[0])
    chain[0].computed = len(COMMON)
    assert prefixes.oldest_unused() is None
    assert prefixes.detach(chain) == []
    assert prefixes.oldest_unused() is chain[0]
    prefixes.drop(chain[0])
    assert prefixes.segments == []


def test_hits_count_what_was_there() -> None:
    prompts = [[*COMMON, i] for i in range(5)]
    prefixes = known(prompts)
    chain = enter(prefixes, prompts[0])
    prefixes.served(chain)
    assert (prefixes.hits, prefixes.hit_tokens) == (0, 0)
    chain[0].computed = len(COMMON)
    prefixes.served(enter(prefixes, prompts[1]))
    assert (prefixes.hits, prefixes.hit_tokens) == (1, len(COMMON))


def test_equality_decides_and_not_the_counts() -> None:
    prefixes = known([[*COMMON, i] for i in range(5)])
    enter(prefixes, [*COMMON, 0])
    near = [*COMMON[:-1], 7, 0]
    chain = prefixes.chain(Row.of(9, near, 1))
    assert all(near[s.offset : s.offset + len(s.tokens)] == s.tokens for s in chain)


def test_a_row_alone_shares_only_what_saves_more_than_it_costs() -> None:
    long = [*COMMON, *OTHER]
    prefixes = known([[*long, 1]])
    prefixes.forget([*long, 1])
    prefixes.observe([*long, 2])
    writes_much = Row.of(1, [*long, 2], len(long) // 2 + 1)
    assert prefixes.chain(writes_much) == ()
    writes_little = Row.of(2, [*long, 2], len(long) // 2)
    (segment,) = prefixes.chain(writes_little)
    prefixes.attach((segment,))
    assert prefixes.chain(writes_much) == (segment,), "another row hangs on it: one more costs nothing"
    prefixes.detach((segment,))
    assert prefixes.chain(writes_much) == ()


def test_rows_that_are_held_make_it_worth_the_cost() -> None:
    prompts = [[*COMMON, i] for i in range(4)]
    prefixes = known(prompts)
    row = Row.of(0, prompts[0], 3 * len(COMMON) // 2)
    assert prefixes.chain(row) != ()
    prefixes.forget(prompts[1])
    assert prefixes.chain(row) == ()
