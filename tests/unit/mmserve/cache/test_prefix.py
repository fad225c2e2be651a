"""Prefix keys and the index: everything that can change a block is in its key, and a hit is never wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.cache.prefix_index import PrefixIndex
from mmserve.cache.prefix_keys import BlockContent, ContentMap, block_key, root_key

ROOT = root_key("model")
PLAIN = BlockContent((1, 2, 3, 4), (("a", -1),), ((0, 3),))


def test_a_key_is_a_full_digest() -> None:
    assert len(block_key(ROOT, PLAIN)) == 32


@pytest.mark.parametrize(
    "other",
    [
        replace(PLAIN, token_ids=(1, 2, 3, 5)),
        replace(PLAIN, token_ids=(1, 2, 4, 3)),
        replace(PLAIN, images=(("b", -1),)),
        replace(PLAIN, images=(("a", 0),)),
        replace(PLAIN, images=()),
        replace(PLAIN, spans=((0, 4),)),
        replace(PLAIN, spans=()),
    ],
)
def test_every_part_of_the_content_changes_the_key(other: BlockContent) -> None:
    assert block_key(ROOT, other) != block_key(ROOT, PLAIN)


def test_the_model_and_the_block_before_change_the_key() -> None:
    first = block_key(ROOT, PLAIN)
    assert len({first, block_key(root_key("adapter"), PLAIN), block_key(first, PLAIN)}) == 3


def test_content_names_each_overlapping_image_and_the_offset_in_it() -> None:
    content = ContentMap([("A", 3, 13), ("B", 13, 17)], [])
    ids = list(range(24))
    assert content.content(ids, 0, 8) == BlockContent(tuple(range(8)), (("A", -3),))
    assert content.content(ids, 8, 16) == BlockContent(tuple(range(8, 16)), (("A", 5), ("B", -5)))
    assert content.content(ids, 16, 24) == BlockContent(tuple(range(16, 24)), (("B", 3),))


def test_two_cuts_of_the_same_placeholder_tokens_differ() -> None:
    ids = [9] * 16
    cuts = [ContentMap([("A", 0, n), ("B", n, 16)], []).content(ids, 0, 16) for n in (10, 6)]
    assert block_key(ROOT, cuts[0]) != block_key(ROOT, cuts[1])


def test_a_span_of_another_length_is_other_content() -> None:
    """What is computed for a span's first token depends on the span's last one."""
    ids = [9] * 16
    long, short = (ContentMap([], [(2, stop)]).content(ids, 0, 8) for stop in (16, 12))
    assert long != short


image_lists = st.lists(st.tuples(st.sampled_from(["a", "b", "ab", ""]), st.integers(-4, 4)), max_size=3)
contents = st.builds(
    BlockContent,
    st.lists(st.integers(0, 3), min_size=0, max_size=4).map(tuple),
    image_lists.map(tuple),
    st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 4)), max_size=2).map(tuple),
)


@given(contents, contents)
@settings(max_examples=300, deadline=None)
def test_equal_keys_mean_equal_contents(one: BlockContent, two: BlockContent) -> None:
    assert (block_key(ROOT, one) == block_key(ROOT, two)) == (one == two)


def blocks(*rows: tuple[int, ...]) -> list[BlockContent]:
    return [BlockContent(row) for row in rows]


def insert_all(index: PrefixIndex, chain: list[BlockContent], first: int = 0) -> None:
    entry = index.root
    for number, content in enumerate(chain):
        inserted = index.insert(entry, content, (first + number,))
        assert inserted is not None
        entry = inserted


def walk(index: PrefixIndex, chain: list[BlockContent]) -> list[int]:
    found, entry = [], index.root
    for content in chain:
        hit = index.find(entry, content)
        if hit is None:
            break
        found.append(hit.blocks[0])
        entry = hit
    return found


def test_the_longest_known_beginning_is_found() -> None:
    index = PrefixIndex("model")
    insert_all(index, blocks((1, 2), (3, 4), (5, 6)))
    assert walk(index, blocks((1, 2), (3, 4), (7, 8))) == [0, 1]
    assert walk(index, blocks((3, 4))) == []


def test_the_first_block_of_equal_content_stays() -> None:
    index = PrefixIndex("model")
    insert_all(index, blocks((1, 2)))
    again = index.insert(index.root, BlockContent((1, 2)), (7,))
    assert again is not None
    assert again.blocks == [0]
    assert 7 not in index


def test_forgetting_a_block_forgets_all_after_it() -> None:
    index = PrefixIndex("model")
    insert_all(index, blocks((1, 2), (3, 4), (5, 6)))
    assert sorted(index.forget(1)) == [1, 2]
    index.check_integrity()
    assert walk(index, blocks((1, 2), (3, 4), (5, 6))) == [0]
    assert index.forget(1) == []


def test_nothing_is_registered_after_a_forgotten_block() -> None:
    index = PrefixIndex("model")
    first = index.insert(index.root, BlockContent((1, 2)), (0,))
    assert first is not None
    index.forget(0)
    assert index.insert(first, BlockContent((3, 4)), (1,)) is None
    assert len(index) == 0


chains = st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=2).map(tuple), min_size=1, max_size=4)


@pytest.mark.parametrize("weak", [lambda _: b"", lambda payload: bytes([sum(payload) % 4])])
@given(known=st.lists(chains, min_size=1, max_size=5), asked=chains)
@settings(max_examples=100, deadline=None)
def test_a_weak_hash_costs_hits_but_never_gives_a_wrong_block(
    weak: object, known: list[list[tuple[int, ...]]], asked: list[tuple[int, ...]]
) -> None:
    index = PrefixIndex("model", digest=weak)  # type: ignore[arg-type]
    history: dict[int, list[tuple[int, ...]]] = {}
    for chain in known:
        entry = index.root
        for length, ids in enumerate(chain, 1):
            inserted = index.insert(entry, BlockContent(ids), (len(history),))
            if inserted is None:
                break
            history.setdefault(inserted.blocks[0], chain[:length])
            entry = inserted
    index.check_integrity()
    for length, block in enumerate(walk(index, [BlockContent(ids) for ids in asked]), 1):
        assert history[block] == asked[:length]
