"""Sizes and lists in words."""

from trainapp.units import bytes_text, listed


def test_bytes_as_text():
    texts = {0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 5.25 * 2**30: "5.2 GiB", 2**43: "8192.0 GiB", -2048: "-2.0 KiB"}
    assert {count: bytes_text(count) for count in texts} == texts


def test_long_lists_say_how_many_more():
    assert listed([]) == ""
    assert listed(["a", "b", "c"]) == "a, b, c"
    assert listed((name for name in "abcde"), most=2) == "a, b and 3 more"
