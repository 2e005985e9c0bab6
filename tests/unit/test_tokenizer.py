import ctypes
import itertools
import random
import signal
import threading
import time

import llama_cpp
import pytest
from gguf_tools import Typed, head, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import bpe_vocab, spm_vocab, tiny_model

from hetero.text.patterns import separable
from hetero.text.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces\tand\ttabs \n\n\nlines \r\n",
    "def f(x: int) -> list[str]:\n    return [str(i) for i in range(x)]\n",
    "日本語のテキスト、中文 한국어 العربية हिन्दी",
    "a😸b é🇯🇵👨‍👩‍👧‍👦 ﷽ \u200d\ufeff",
    "1234567890 3.14159 0xFF 1e-9",
    "{'a': [1, 2, {\"b\": null}]} <|im_start|>user\nhi<|im_end|> <start_of_turn>model</s><s><bos>",
    "nul\x00in the middle",
    "ſß ǅ İi ﬁ Å Å",
    "<html><body><h1>x</h1></body></html>",
    "x" * 3000,
]


def test_ctrl_c_while_a_vocabulary_is_read_is_not_lost(monkeypatch, smollm2_path):
    """It may come while Python is called by libllama, where what is raised goes nowhere."""
    load = llama_cpp.llama_cpp.llama_model_load_from_file
    called_back = ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(signal.SIGINT))

    def interrupted(*arguments):
        called_back()
        return load(*arguments)

    monkeypatch.setattr(llama_cpp.llama_cpp, "llama_model_load_from_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Tokenizer(smollm2_path)


@pytest.fixture(scope="module", params=["smollm2_path", "gemma3_path"])
def path(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def tokenizer(path):
    return Tokenizer(path)


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return Tokenizer(smollm2_path)


def test_equals_libllama(tokenizer, path):
    oracle = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    assert tokenizer.n_vocab == oracle.n_vocab()
    for text in TEXTS:
        for parse in (False, True):
            for special in (False, True):
                ids = tokenizer.encode(text, parse_special=parse, add_special=special)
                assert ids == oracle.tokenize(text.encode(), add_bos=special, special=parse), (text, parse)


PIECES = [
    "a",
    " b",
    "  ",
    "é",
    "😸",
    "\n",
    "\n\n",
    "\t\t",
    "<h1>",
    "</h1>",
    "<|im_end|>",
    "<bos>",
    "<",
    ">",
    "1",
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=25), st.booleans(), st.booleans())
def test_finding_special_tokens_ourselves_changes_nothing(tokenizer, pieces, parse, special):
    text = "".join(pieces)
    expected = tokenizer._encode(text, parse, special)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetero.text.tokenizer.LONG_TEXT", 0)
        assert tokenizer._user_defined is not None
        assert tokenizer.encode(text, parse_special=parse, add_special=special) == expected


def test_long_texts(tokenizer):
    text = "".join(random.Random(0).choices([*TEXTS[:-1], *PIECES], k=800))
    for parse in (False, True):
        ids = tokenizer.encode(text, parse_special=parse, add_special=True)
        assert ids == tokenizer._encode(text, parse, True)


@pytest.mark.parametrize("word", ["<", "\n\t", "a b\n", "<h1>", "<unused", "1", " ", "😸"])
def test_work_grows_with_the_text_only(tokenizer, word):
    start = time.process_time()
    tokenizer.encode(word * (200_000 // len(word)), parse_special=True, add_special=True)
    assert time.process_time() - start < 3


def test_decoding_gives_the_text_back(tokenizer):
    for text in TEXTS:
        ids = tokenizer.encode(text, parse_special=False, add_special=False)
        assert tokenizer.decode(ids) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
        assert tokenizer.decode(tokenizer.encode(text, parse_special=False, add_special=True)) == text


def test_facts_of_the_real_models(smollm2_path, gemma3_path):
    smol, gemma = Tokenizer(smollm2_path), Tokenizer(gemma3_path)
    assert (smol.n_vocab, smol.bos_id, smol.eos_id, smol.add_bos) == (49152, 1, 2, False)
    assert (gemma.n_vocab, gemma.bos_id, gemma.eos_id, gemma.add_bos) == (262144, 2, 1, True)
    assert 2 in smol.eog_ids and {1, 106} <= gemma.eog_ids
    assert smol.control_texts["<|im_start|>"] == 1 and gemma.control_texts["<start_of_turn>"] == 105
    assert smol.token_bytes(1) == b"" and smol.token_text(1) == "<|im_start|>"
    assert smol.encode("", parse_special=True, add_special=True) == []
    assert gemma.encode("", parse_special=True, add_special=True) == [2]


def test_loading_is_quick(path):
    start = time.process_time()
    Tokenizer(path)
    assert time.process_time() - start < 1.5


def test_control_tokens_only_where_parsed(smollm2):
    plain = smollm2.encode("<|im_start|>", parse_special=False, add_special=False)
    assert 1 not in plain and len(plain) > 1
    segments = [("<|im_start|>user\nhi ", True), ("<|im_end|>", False), ("<|im_end|>\n", True)]
    ids = smollm2.encode_segments(segments, add_special=False)
    assert ids.count(1) == 1 and ids.count(2) == 1
    assert "".join(map(smollm2.token_text, ids)) == "".join(text for text, _ in segments)


def test_no_control_token_across_a_border(smollm2):
    ids = smollm2.encode_segments([("a<", True), ("|im_end|>", True)], add_special=False)
    assert 2 not in ids and smollm2.decode(ids) == "a<|im_end|>"


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            ["a", " b", "  ", "é", "😸", "\n", "the", "<|im_start|>", "<|im_end|>", "<", "|>", "<bos>"]
        ),
        max_size=12,
    ),
    st.lists(st.integers(0, 40), max_size=4),
    st.booleans(),
)
def test_borders_between_plain_texts_leave_no_trace(tokenizer, words, cuts, special):
    """Cut anywhere but inside a control token, the ids are those of the whole text."""
    text = "".join(words)
    inside = {
        at
        for match in tokenizer.control_pattern.finditer(text)
        for at in range(match.start() + 1, match.end())
    }
    borders = sorted({0, len(text), *(c for c in cuts if c < len(text))} - inside)
    segments = [(text[a:b], True) for a, b in itertools.pairwise(borders)]
    whole = tokenizer.encode_segments([(text, True)], add_special=special)
    assert tokenizer.encode_segments(segments, add_special=special) == whole
    if not text.startswith("<bos>"):
        assert whole == tokenizer.encode(text, parse_special=True, add_special=special)


def test_a_prompt_with_its_own_bos_gets_no_second(gemma3_path):
    gemma = Tokenizer(gemma3_path)
    for segments in ([("<bos>hi", True)], [("hi", True)], [("<bos>h", True), ("i", False)]):
        ids = gemma.encode_segments(segments, add_special=True)
        assert ids[0] == 2 and ids.count(2) == 1
    assert gemma.encode_segments([("<bos>", False)], add_special=True).count(2) == 1


def test_a_vocabulary_that_adds_a_space_adds_it_once_per_plain_text(tmp_path):
    metadata = {"tokenizer.ggml.add_space_prefix": True}
    tokenizer = Tokenizer(tiny_model(tmp_path / "a.gguf", "gemma3", metadata=metadata))
    text = "the<end_of_turn>that is"
    whole = tokenizer.encode(text, parse_special=True, add_special=True)
    assert tokenizer.decode(whole) == " the that is"
    for segments in ([("th", True), (text[2:], True)], [("the<end_of_turn>t", True), ("hat is", False)]):
        assert tokenizer.encode_segments(segments, add_special=True) == whole


def test_control_pattern_finds_the_longest(tmp_path):
    vocab = bpe_vocab()
    vocab["tokenizer.ggml.tokens"][:3] = ["<|a", "<|a|>", "<|a|>b"]
    tokenizer = Tokenizer(tiny_model(tmp_path / "a.gguf", metadata=vocab))
    assert tokenizer.control_pattern.findall("<|a|><|a|>b<|a<|b") == ["<|a|>", "<|a|>b", "<|a"]


@pytest.mark.parametrize(
    "texts, expected",
    [
        ({"<a>", "<b>", "<a>b"}, True),
        ({"\n", "\n\n", "\n\n\n", "<a>"}, True),
        ({"ab", "bc"}, False),
        ({"aba"}, False),
        ({"\n\n", "\na"}, False),
        ({"a\n", "\n"}, False),
        ({"x" * 300}, False),
        (set(), True),
    ],
)
def test_separable(texts, expected):
    assert separable(texts) == expected


def test_ids_outside_the_vocabulary(smollm2):
    for token_id in (smollm2.n_vocab, 10**6):
        with pytest.raises(IndexError):
            smollm2.token_text(token_id)
        with pytest.raises(IndexError):
            smollm2.token_bytes(token_id)


def test_lone_surrogates_do_not_fail(smollm2):
    ids = smollm2.encode("a\ud800b", parse_special=True, add_special=False)
    assert smollm2.decode(ids) == "a?b"


def test_encoding_from_many_threads(smollm2):
    texts = [random.Random(i).choice(TEXTS) * 3 for i in range(16)]
    expected = [smollm2.encode(t, parse_special=True, add_special=True) for t in texts]
    results: dict[int, list[int]] = {}

    def work(i: int) -> None:
        results[i] = smollm2.encode(texts[i], parse_special=True, add_special=True)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[i] for i in range(16)] == expected


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_tiny_models(tmp_path, arch):
    tokenizer = Tokenizer(tiny_model(tmp_path / "a.gguf", arch))
    text = "the thing, 日本 😸!"
    ids = tokenizer.encode(text, parse_special=True, add_special=True)
    assert tokenizer.decode(ids) == text
    assert (ids[0] == tokenizer.bos_id) == tokenizer.add_bos == (arch == "gemma3")


def refused(path) -> str:
    with pytest.raises(ValueError) as error:
        Tokenizer(path)
    message = str(error.value)
    assert str(path) in message and "\n" not in message
    return message


def test_files_without_a_vocabulary(tmp_path):
    path = tmp_path / "a.gguf"
    assert "cannot be read" in refused(path)
    path.write_bytes(head(0, 0))
    assert "tokenizer.ggml.tokens" in refused(path)
    write_gguf(path, {"general.architecture": "llama", **bpe_vocab(), "tokenizer.ggml.pre": "nope"}, {})
    assert "vocabulary cannot be loaded" in refused(path)


@pytest.mark.parametrize(
    "key, value",
    [
        ("tokens", 3),
        ("tokens", [1, 2]),
        ("token_type", [1, 1]),
        ("token_type", Typed("u8", [1] * 353)),
        ("scores", Typed("f32", [1.0] * 352)),
        ("scores", "x"),
        ("merges", Typed("i32", [1])),
    ],
)
def test_arrays_libllama_would_misread(tmp_path, key, value):
    metadata = {"general.architecture": "gemma3", **spm_vocab(), f"tokenizer.ggml.{key}": value}
    assert f"tokenizer.ggml.{key}" in refused(write_gguf(tmp_path / "a.gguf", metadata, {}))
