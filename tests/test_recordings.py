import gzip
import json
import os
import resource
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

import stallwatch
from stallwatch.observations import ObserverSample, StreamTokens
from stallwatch.recorder import codec
from stallwatch.recorder.file import FullError, RecordingFile
from stallwatch.recorder.header import Header, header_for
from stallwatch.recorder.reading import Note, Recording, RecordingError
from stallwatch.recorder.tape import Chunk, pack
from stallwatch.settings import Settings

HEADER = header_for(Settings(), unix_offset=1.7e9)
LINES = [codec.encode(ObserverSample(float(second), 0.001)) for second in range(3)]


def written(path: Path, *lines: str, end: str = "\n") -> Recording:
    path.write_text("\n".join([HEADER.line(), *lines]) + end)
    return Recording(path)


def chunk(*lines: str) -> Chunk:
    return Chunk(0.0, 1.0, len(lines), pack(list(lines)))


def test_reads_plain_and_packed(tmp_path: Path) -> None:
    """A recording is the same whether it is compressed or not, and whatever its name is."""
    plain = written(tmp_path / "case", *LINES)
    packed = tmp_path / "case.txt"
    packed.write_bytes(pack([HEADER.line()]) + pack(LINES[:1]) + pack(LINES[1:]))

    assert list(plain) == list(Recording(packed))
    assert list(plain)[1:] == [ObserverSample(0.0, 0.001), ObserverSample(1.0, 0.001), ObserverSample(2.0, 0.001)]


def test_header_carries_settings_without_secrets_and_paths(tmp_path: Path) -> None:
    """What is in force goes into the header; keys, and where files are on the machine, do not."""
    settings = Settings.model_validate(
        {
            "engine": {"api_key": "sk-very-secret", "ca_file": "/etc/here/ca.pem"},
            "canary": {"api_key_file": "/run/secrets/other-key"},
            "web": {"bearer_token_file": "/run/secrets/tokens"},
            "recorder": {"directory": "/srv/incidents", "file": "/srv/case.jsonl"},
            "slo": {"itl_seconds": 0.25},
        }
    )
    line = header_for(settings, unix_offset=1.0).line()
    (tmp_path / "case").write_text(line + "\n")
    (header,) = Recording(tmp_path / "case")

    assert isinstance(header, Header)
    assert header.settings["slo"]["itl_seconds"] == 0.25
    assert header.settings["canary"]["mode"] == "pulse"
    for secret in ("sk-very-secret", "api_key", "/etc", "/run", "/srv", "tokens_file"):
        assert secret not in line


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "case: empty"),
        (b"hello\n", "case: not JSON"),
        (b"hello", "case: not a recording of stallwatch"),
        (b'{"type":"observer","at":1,"lag":0}\n', "case: not a recording of stallwatch"),
        (b'{"type":"header","format":"tar"}\n', "case: not a recording of stallwatch"),
        (b"\x1f\x8b\x08 no gzip", "case: empty"),
        (b'{"type":"header","format":"stallwatch recording","version":1}\n', "a header without unix_offset"),
        (
            b'{"type":"header","format":"stallwatch recording","version":1,"unix_offset":1,"settings":{"slo":1}}\n',
            "a header whose settings are not groups",
        ),
        (
            b'{"type":"header","format":"stallwatch recording","version":2,"stallwatch":"9.1.0","unix_offset":1}\n',
            rf"written by stallwatch 9.1.0 in version 2 of the format, and stallwatch {stallwatch.__version__} reads ",
        ),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    """A file that is none of ours, or of a later format, is refused with one sentence that says so."""
    (tmp_path / "case").write_bytes(content)

    with pytest.raises(RecordingError, match=problem):
        list(Recording(tmp_path / "case"))


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    """A path that leads nowhere is no traceback."""
    with pytest.raises(RecordingError, match="no such file"):
        list(Recording(tmp_path / "none"))


def test_damage_names_its_line(tmp_path: Path) -> None:
    """A line in the middle that cannot be read stops the reading and is named, also when it is the last."""
    with pytest.raises(RecordingError, match="case: line 3: lag: missing"):
        list(written(tmp_path / "case", LINES[0], '{"type":"observer","at":1}', LINES[1]))
    with pytest.raises(RecordingError, match="case: line 2: at: not a time"):
        list(written(tmp_path / "case", '{"type":"observer","at":"nan","lag":0}'))


def test_a_torn_end_costs_only_itself(tmp_path: Path) -> None:
    """A file that breaks off is read up to there: in a line, in a packed chunk, and between two sessions."""
    in_line = written(tmp_path / "line", LINES[0], LINES[1][:10], end="")
    assert (len(list(in_line)), in_line.torn) == (2, True)

    packed = tmp_path / "packed"
    packed.write_bytes(pack([HEADER.line()]) + pack(LINES[:1]) + pack(LINES[1:])[:-9])
    in_chunk = Recording(packed)
    assert (list(in_chunk)[1], in_chunk.torn) == (ObserverSample(0.0, 0.001), True)

    sessions = written(tmp_path / "sessions", LINES[0], LINES[1][:10], HEADER.line(), LINES[2])
    assert [type(entry).__name__ for entry in sessions] == ["Header", "ObserverSample", "Header", "ObserverSample"]
    assert sessions.torn


def test_newer_words_are_counted(tmp_path: Path) -> None:
    """Lines that a newer version added are passed over and counted; notes come through."""
    new = '{"type":"telepathy","at":1.0}'
    recording = written(tmp_path / "case", new, LINES[0], new, codec.encode_note("lost", {"observations": 7}))

    assert list(recording)[1:] == [ObserverSample(0.0, 0.001), Note("lost", {"observations": 7})]
    assert recording.passed_over == Counter({"type 'telepathy' is not known": 2})


def test_an_endless_line_is_refused(tmp_path: Path) -> None:
    """A small packed file that unpacks to one endless line is not read into memory."""
    path = tmp_path / "bomb"
    path.write_bytes(pack([HEADER.line()]) + gzip.compress(b"x" * 50_000_000))

    with pytest.raises(RecordingError, match="line 2: longer than 4 MiB"):
        list(Recording(path))


def entries(path: Path) -> Sequence[str]:
    return [type(entry).__name__ for entry in Recording(path)]


@pytest.mark.parametrize("name", ["case.jsonl", "case.jsonl.gz"])
def test_a_recording_is_appended_to(tmp_path: Path, name: str) -> None:
    """A restart adds a session to the file that is there, and jq reads every line of it."""
    path = tmp_path / "new folder" / name
    for _ in range(2):
        file = RecordingFile(path, 10_000, HEADER)
        file.append(chunk(*LINES[:2]))
        file.append(chunk(LINES[2]))

    assert entries(path) == ["Header", *["ObserverSample"] * 3] * 2
    content = gzip.decompress(path.read_bytes()) if name.endswith("gz") else path.read_bytes()
    assert all(json.loads(line)["type"] for line in content.splitlines())


def test_a_recording_ends_at_its_bound(tmp_path: Path) -> None:
    """The file never grows beyond its bound, and what is in it can be read."""
    path = tmp_path / "case.jsonl"
    file = RecordingFile(path, 1_900, HEADER)
    while path.stat().st_size < 1_800 if path.exists() else True:
        file.append(chunk(*LINES))
    with pytest.raises(FullError, match=r"reached recorder\.max_bytes"):
        file.append(chunk(*LINES))
    size = path.stat().st_size
    file.append(chunk(*LINES))  # silently: it was said once

    assert path.stat().st_size == size <= 1_900
    assert len(entries(path)) > 3


def test_somebody_elses_file_is_left_alone(tmp_path: Path) -> None:
    """A file that is no recording is not appended to."""
    path = tmp_path / "notes.txt"
    path.write_text("my notes\n")

    with pytest.raises(FullError, match="is there already and is not a recording"):
        RecordingFile(path, 10_000, HEADER).append(chunk(*LINES))
    assert path.read_text() == "my notes\n"


def test_what_is_lost_is_said_where_it_is_missing(tmp_path: Path) -> None:
    """A disk that fails for a while leaves whole lines and a note of how much is missing."""
    path = tmp_path / "case.jsonl"
    file = RecordingFile(path, 100_000, HEADER)
    file.append(chunk(LINES[0]))
    path.rename(tmp_path / "away")
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        file.append(chunk(LINES[1], LINES[2]))
    path.rmdir()
    (tmp_path / "away").rename(path)
    file.lose(5)
    file.append(chunk(codec.encode(StreamTokens(9.0, 1, 1))))

    assert list(Recording(path))[2:] == [Note("lost", {"observations": 7}), StreamTokens(9.0, 1, 1)]


def test_half_a_write_is_taken_back(tmp_path: Path) -> None:
    """A disk that takes only a part of a write does not leave half a line: the file can be read, and goes on later."""
    path = tmp_path / "case.jsonl"
    file = RecordingFile(path, 100_000, HEADER)
    file.append(chunk(LINES[0]))
    size = path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, before[1]))
    try:
        with pytest.raises(OSError, match="No space left"):
            file.append(chunk(LINES[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert path.stat().st_size == size
    file.append(chunk(LINES[2]))
    assert list(Recording(path))[2:] == [Note("lost", {"observations": 1}), ObserverSample(2.0, 0.001)]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")  # noqa: PTH110
def test_a_full_disk_is_an_error_that_is_heard() -> None:
    """A write that the device refuses is an OSError."""
    with pytest.raises(OSError, match="No space left"):
        RecordingFile(Path("/dev/full"), 1 << 40, HEADER).append(chunk(*LINES))
