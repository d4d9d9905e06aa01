"""Headers: what the safetensors library writes we read alike, and what it refuses we refuse."""

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
import safetensors
from checkpoint_files import entry, library_file, safetensors_bytes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oddrank.checkpoint.header import MAX_HEADER, Header, parse_header, read_header
from oddrank.errors import OddrankError

ONE = entry("F32", [1], 0, 4)
STRICTER = ("twice", "unknown field", "dimensions", "too large", "got `array`")


def read(tmp_path: Path, raw: bytes) -> Header:
    file = tmp_path / "m.safetensors"
    file.write_bytes(raw)
    return read_header(file)


def library_accepts(raw: bytes) -> bool:
    try:
        safetensors.deserialize(raw)
    except safetensors.SafetensorError:
        return False
    return True


NAMES = st.text(st.characters(blacklist_categories=["Cs"]), max_size=12).filter(lambda n: n != "__metadata__")
SHAPES = st.lists(st.integers(0, 4), max_size=4)
DTYPES = st.sampled_from([("uint8", "U8", 1), ("bfloat16", "BF16", 2), ("float32", "F32", 4), ("int64", "I64", 8)])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(NAMES, st.tuples(DTYPES, SHAPES), max_size=6),
    st.dictionaries(NAMES, st.text(max_size=5), max_size=3),
)
def test_files_of_the_library_are_read_alike(
    tmp_path: Path, tensors: dict[str, tuple[tuple[str, str, int], list[int]]], metadata: dict[str, str]
) -> None:
    metadata = {
        k.encode("utf-8", "replace").decode(): v.encode("utf-8", "replace").decode() for k, v in metadata.items()
    }
    file = tmp_path / "m.safetensors"
    content = {}
    for number, (name, ((spelled, _, width), shape)) in enumerate(tensors.items()):
        size = width
        for n in shape:
            size *= n
        content[name] = (spelled, shape, bytes([number]) * size)
    library_file(file, content, **metadata)
    raw = file.read_bytes()
    header = read_header(file, "shard")
    assert header.metadata == metadata
    assert {t.name: (t.dtype, list(t.shape), raw[t.start : t.end]) for t in header.tensors} == {
        name: (tensors[name][0][1], shape, data) for name, (_, shape, data) in content.items()
    }
    assert all(t.file == "shard" and t.nbytes == t.end - t.start for t in header.tensors)
    assert [t.start for t in header.tensors] == sorted(t.start for t in header.tensors)


MALFORMED: dict[str, tuple[bytes, str]] = {
    "no bytes": (b"", "it has 0 bytes"),
    "seven bytes": (b"\0" * 7, "it has 7 bytes"),
    "header longer than the file": (safetensors_bytes({"a": ONE})[:-1], "only 60 bytes follow"),
    "header of exabytes": (b"\xff" * 8 + b"{}", "claims 18446744073709551615 bytes"),
    "empty header": (safetensors_bytes(b""), "not a JSON object"),
    "not JSON": (safetensors_bytes(b"{'a': 1}"), "not a JSON object"),
    "trailing text": (safetensors_bytes(b"{} {}"), "not a JSON object"),
    "cut JSON": (safetensors_bytes(b'{"a":'), "not a JSON object"),
    "byte order mark": (safetensors_bytes(b"\xef\xbb\xbf{}"), "not a JSON object"),
    "NaN": (safetensors_bytes(b'{"a": NaN}'), "not a JSON object"),
    "array": (safetensors_bytes([]), "not a JSON object"),
    "string": (safetensors_bytes("a"), "not a JSON object"),
    "name not UTF-8": (safetensors_bytes(b'{"\xff": 1}'), "not a JSON object"),
    "dtype not UTF-8": (
        safetensors_bytes(b'{"a":{"dtype":"\xff","shape":[1],"data_offsets":[0,4]}}'),
        "'a' is malformed",
    ),
    "lone surrogate": (safetensors_bytes(b'{"\\ud800": 1}'), "not a JSON object"),
    "deep": (safetensors_bytes(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "nested too deeply"),
    "deep metadata": (
        safetensors_bytes(b'{"__metadata__":' + b'{"a":' * 500 + b"1" + b"}" * 501),
        "__metadata__",
    ),
    "metadata of numbers": (safetensors_bytes({"__metadata__": {"a": 1}}), "__metadata__"),
    "metadata array": (safetensors_bytes({"__metadata__": []}), "__metadata__"),
    "entry is a number": (safetensors_bytes({"a": 1}), "'a' is malformed"),
    "entry is an array": (safetensors_bytes({"a": ["F32", [1], [0, 4]]}, b"1234"), "got `array`"),
    "no dtype": (
        safetensors_bytes({"a": {"shape": [1], "data_offsets": [0, 4]}}, b"1234"),
        "missing required field",
    ),
    "no shape": (
        safetensors_bytes({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, b"1234"),
        "missing required field",
    ),
    "no offsets": (
        safetensors_bytes({"a": {"dtype": "F32", "shape": [1]}}, b"1234"),
        "missing required field",
    ),
    "extra field": (safetensors_bytes({"a": {**ONE, "x": 1}}, b"1234"), "unknown field"),
    "dtype number": (safetensors_bytes({"a": {**ONE, "dtype": 1}}, b"1234"), "Expected `str`"),
    "unknown dtype": (safetensors_bytes({"a": {**ONE, "dtype": "F31"}}, b"1234"), "unknown dtype 'F31'"),
    "lower-case dtype": (safetensors_bytes({"a": {**ONE, "dtype": "f32"}}, b"1234"), "unknown dtype"),
    "shape number": (safetensors_bytes({"a": {**ONE, "shape": 1}}, b"1234"), "Expected `array`"),
    "shape of strings": (safetensors_bytes({"a": {**ONE, "shape": ["1"]}}, b"1234"), "Expected `int`"),
    "shape of floats": (safetensors_bytes({"a": {**ONE, "shape": [1.0]}}, b"1234"), "Expected `int`"),
    "shape of booleans": (safetensors_bytes({"a": {**ONE, "shape": [True]}}, b"1234"), "Expected `int`"),
    "negative shape": (safetensors_bytes({"a": {**ONE, "shape": [-1]}}, b"1234"), ">= 0"),
    "two negatives": (safetensors_bytes({"a": {**ONE, "shape": [-1, -1]}}, b"1234"), ">= 0"),
    "shape of 2^63": (safetensors_bytes({"a": {**ONE, "shape": [2**63]}}, b"1234"), "<= 9223372036854775807"),
    "shape of 2^64 + 1": (
        safetensors_bytes({"a": {**ONE, "shape": [2**64 + 1]}}, b"1234"),
        "<= 9223372036854775807",
    ),
    "digits": (
        safetensors_bytes(b'{"a":{"dtype":"U8","shape":[' + b"9" * 9999 + b'],"data_offsets":[0,4]}}'),
        "malformed",
    ),
    "product wraps to 1": (
        safetensors_bytes({"a": entry("U8", [2**62 + 1, 4], 0, 4)}, b"1234"),
        "too large to exist",
    ),
    "product of 2^64": (safetensors_bytes({"a": entry("U8", [2**32, 2**32], 0, 0)}), "too large to exist"),
    "empty but huge": (safetensors_bytes({"a": entry("U8", [0, 2**62, 2**62], 0, 0)}), "too large to exist"),
    "33 dimensions": (safetensors_bytes({"a": entry("U8", [1] * 33, 0, 1)}, b"1"), "33 dimensions"),
    "a million dimensions": (
        safetensors_bytes({"a": entry("U8", [2**60] * 10**6, 0, 1)}, b"1"),
        "1000000 dimensions",
    ),
    "one offset": (safetensors_bytes({"a": {**ONE, "data_offsets": [4]}}, b"1234"), "length 2"),
    "three offsets": (safetensors_bytes({"a": {**ONE, "data_offsets": [0, 4, 4]}}, b"1234"), "length 2"),
    "negative offset": (safetensors_bytes({"a": entry("F32", [1], -4, 0)}, b"1234"), ">= 0"),
    "end before start": (safetensors_bytes({"a": entry("F32", [1], 4, 0)}, b"1234"), "before its start"),
    "size too small": (
        safetensors_bytes({"a": entry("F32", [1], 0, 3)}, b"123"),
        "takes 4 bytes, but its offsets [0, 3] span 3",
    ),
    "size too large": (safetensors_bytes({"a": entry("F32", [1], 0, 5)}, b"12345"), "takes 4 bytes"),
    "empty with bytes": (safetensors_bytes({"a": entry("F32", [0], 0, 4)}, b"1234"), "takes 0 bytes"),
    "half a byte": (safetensors_bytes({"a": entry("F4", [3], 0, 2)}, b"12"), "12 bits"),
    "cut data": (safetensors_bytes({"a": ONE}, b"123"), "cut short by 1 bytes"),
    "no data": (safetensors_bytes({"a": ONE}), "cut short by 4 bytes"),
    "trailing data": (safetensors_bytes({"a": ONE}, b"12345"), "1 bytes follow tensor 'a'"),
    "data of no tensor": (safetensors_bytes({}, b"1"), "1 bytes follow the header"),
    "starts late": (
        safetensors_bytes({"a": entry("U8", [1], 1, 2)}, b"12"),
        "hole of 1 bytes after the header",
    ),
    "hole": (
        safetensors_bytes({"a": ONE, "b": entry("F32", [1], 8, 12)}, bytes(12)),
        "hole of 4 bytes after tensor 'a'",
    ),
    "overlap": (safetensors_bytes({"a": ONE, "b": entry("F32", [1], 2, 6)}, bytes(6)), "overlaps tensor 'a'"),
    "same bytes": (safetensors_bytes({"a": ONE, "b": ONE}, bytes(4)), "overlaps tensor 'a'"),
    "name twice": (
        safetensors_bytes(b'{"a":%s,"a":%s}' % ((b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}',) * 2)),
        "'a' twice",
    ),
    "name twice, escaped": (
        safetensors_bytes(b'{"a":%s,"\\u0061":%s}' % ((b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}',) * 2)),
        "'a' twice",
    ),
    "field twice": (
        safetensors_bytes(b'{"a":{"dtype":"U8","dtype":"I8","shape":[0],"data_offsets":[0,0]}}'),
        "'dtype' twice",
    ),
    "name twice, once without fields": (
        safetensors_bytes(b'{"a":{},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
        "'a' twice",
    ),
    "metadata twice": (safetensors_bytes(b'{"__metadata__":{},"__metadata__":{}}'), "'__metadata__' twice"),
    "metadata key twice": (safetensors_bytes(b'{"__metadata__":{"a":"1","a":"2"}}'), "'a' twice"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_are_refused(tmp_path: Path, case: str) -> None:
    raw, part = MALFORMED[case]
    with pytest.raises(OddrankError) as error:
        read(tmp_path, raw)
    message = str(error.value)
    assert part in message and str(tmp_path / "m.safetensors") in message
    assert "\n" not in message and len(message) < 1000
    # The library refuses them too, except those that only the format's text forbids.
    assert not library_accepts(raw) or any(reason in message for reason in STRICTER)


def test_header_above_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    with open(file, "wb") as stream:
        stream.write((MAX_HEADER + 1).to_bytes(8, "little"))
        stream.truncate(MAX_HEADER + 100)
    with pytest.raises(OddrankError, match="above the format's limit of 100000000"):
        read_header(file)


WELL_FORMED: dict[str, bytes] = {
    "nothing": safetensors_bytes({}),
    "null metadata": safetensors_bytes({"__metadata__": None, "a": ONE}, b"1234"),
    "padded": safetensors_bytes(b'{"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}    ', b"1"),
    "field names as names": safetensors_bytes({"dtype": ONE, "shape": entry("U8", [], 4, 5)}, b"12345"),
    "field names in metadata": safetensors_bytes(
        {"__metadata__": {"dtype": "shape", "__metadata__": "\\"}, "a": ONE}, b"1234"
    ),
    "out of order": safetensors_bytes({"a": entry("U8", [4], 4, 8), "b": ONE}, bytes(8)),
    "empty in between": safetensors_bytes(
        {"b": entry("U8", [0], 4, 4), "a": entry("U8", [4], 4, 8), "c": ONE}, bytes(8)
    ),
    "escaped names": safetensors_bytes({'"\\\n': ONE}, b"1234"),
    "unaligned": safetensors_bytes({"a": entry("U8", [1], 0, 1), "b": entry("F32", [1], 1, 5)}, b"12345"),
}


@pytest.mark.parametrize("case", WELL_FORMED)
def test_unusual_but_well_formed(tmp_path: Path, case: str) -> None:
    raw = WELL_FORMED[case]
    header = read(tmp_path, raw)
    found = {t.name: (t.dtype, list(t.shape), raw[t.start : t.end]) for t in header.tensors}
    assert found == {n: (t["dtype"], t["shape"], bytes(t["data"])) for n, t in safetensors.deserialize(raw)}


def mutate(rng: random.Random, raw: bytes) -> bytes:
    """One to three edits: a bit, a byte, a run cut out, doubled or moved, a number or a word put in."""
    words = [
        b'"',
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"-1",
        b"0",
        b"1e9",
        b"9" * 25,
        b"null",
        b"\\",
        b"\\u0000",
        b"\xff",
    ]
    words += [
        b'"dtype"',
        b'"F4"',
        b'"__metadata__"',
        b"18446744073709551615",
        b"4",
        b" ",
        b"\n",
        b"true",
        b"1.0",
    ]
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(raw) + 1)
        run = rng.randrange(1, 12)
        match rng.randrange(6):
            case 0 if at < len(raw):
                raw = raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1 :]
            case 1:
                raw = raw[:at] + rng.choice(words) + raw[at:]
            case 2:
                raw = raw[:at] + rng.choice(words) + raw[at + run :]
            case 3:
                raw = raw[:at] + raw[at + run :]
            case 4:
                raw = raw[: at + run] + raw[at:]
            case _:
                raw = raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :]
    return raw


def test_mutated_headers_raise_only_our_error() -> None:
    """Whatever the bytes: an OddrankError, or a header that the library reads as well, and alike."""
    rng = random.Random(20)
    seed: dict[str, Any] = {
        "__metadata__": {"format": "pt"},
        "model.embed.weight": entry("BF16", [4, 2], 0, 16),
        "b": entry("F4", [2, 2], 16, 18),
        "c": entry("F8_E4M3", [], 18, 19),
        "empty": entry("I64", [0, 7], 19, 19),
    }
    accepted = refused = 0
    for _ in range(12000):
        raw = safetensors_bytes(seed, bytes(19))
        header, data = raw[8:-19], raw[-19:]
        kind = rng.randrange(8)
        if kind == 0:
            raw = mutate(rng, raw)
        else:
            header = mutate(rng, header)
            raw = len(header).to_bytes(8, "little") + header + data
        try:
            length = int.from_bytes(raw[:8], "little")
            if length > len(raw) - 8:
                continue
            found = parse_header(raw[8 : 8 + length], len(raw), Path("m.safetensors"), "m")
        except OddrankError as error:
            refused += 1
            assert not library_accepts(raw) or any(reason in str(error) for reason in STRICTER), raw
        else:
            accepted += 1
            ours = {t.name: (t.dtype, list(t.shape), raw[t.start : t.end]) for t in found.tensors}
            theirs = safetensors.deserialize(raw)
            assert ours == {n: (t["dtype"], t["shape"], bytes(t["data"])) for n, t in theirs}
    assert accepted > 100 and refused > 6000


def test_mutated_files_raise_only_our_error(tmp_path: Path) -> None:
    rng = random.Random(21)
    whole = safetensors_bytes({"a": ONE, "b": entry("U8", [3], 4, 7)}, b"1234567")
    for _ in range(500):
        raw = mutate(rng, whole) if rng.random() < 0.5 else whole[: rng.randrange(len(whole) + 1)]
        try:
            read(tmp_path, raw)
        except OddrankError as error:
            assert not library_accepts(raw) or any(reason in str(error) for reason in STRICTER)
        else:
            assert library_accepts(raw)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 400))
def test_any_bytes(raw: bytes, size: int) -> None:
    with contextlib.suppress(OddrankError):
        parse_header(raw, size, Path("m.safetensors"), "m")
