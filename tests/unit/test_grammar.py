import json
import random
import threading
import time

import numpy as np
import pytest

from hetero.request import RequestError
from hetero.text import grammar as grammar_module
from hetero.text.deep_stack import on_deep_stack
from hetero.text.grammar import GrammarCompiler
from hetero.text.output import MAX_CHARS
from hetero.text.tokenizer import Tokenizer

SMILE = "a😸b中文é🇯🇵"


@pytest.fixture(scope="module")
def tokenizer(smollm2_path):
    return Tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer)


def schema_format(schema) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def generate(tokenizer, grammar, seed: int, limit: int = 200) -> str:
    """What a model with random logits writes when the masks are applied."""
    rng = np.random.default_rng(seed)
    row = np.zeros((tokenizer.n_vocab + 31) // 32, np.int32)
    ids = []
    while not grammar.is_finished and len(ids) < limit:
        grammar.fill_mask(row)
        allowed = np.unpackbits(row.view(np.uint8), bitorder="little")[: tokenizer.n_vocab].astype(bool)
        assert allowed.any()
        logits = np.where(allowed, rng.standard_normal(tokenizer.n_vocab), -np.inf)
        token_id = int(logits.argmax())
        assert grammar.accept(token_id)
        if token_id in tokenizer.eog_ids:
            break
        ids.append(token_id)
    return tokenizer.decode(ids)


@pytest.mark.parametrize("model", ["smollm2_path", "gemma3_path"])
def test_a_single_allowed_value_is_written_exactly(model, request):
    tokenizer = Tokenizer(request.getfixturevalue(model))
    compiler = GrammarCompiler(tokenizer)
    response_format = schema_format({"type": "string", "enum": [SMILE]})
    for seed in range(8):
        grammar = compiler.compile(response_format)
        assert generate(tokenizer, grammar, seed) == json.dumps(SMILE, ensure_ascii=False)
        assert grammar.is_finished


def test_output_follows_the_schema(tokenizer, compiler):
    schema = {
        "type": "object",
        "properties": {
            "n": {"type": "integer", "minimum": 3, "maximum": 40},
            "kind": {"enum": ["x", "y"]},
            "on": {"type": "boolean"},
        },
        "required": ["n", "kind", "on"],
        "additionalProperties": False,
    }
    for seed in range(12):
        value = json.loads(generate(tokenizer, compiler.compile(schema_format(schema)), seed))
        assert list(value) == ["n", "kind", "on"]
        assert 3 <= value["n"] <= 40 and value["kind"] in ("x", "y") and isinstance(value["on"], bool)


def test_json_object_starts_an_object(tokenizer, compiler):
    grammar = compiler.compile({"type": "json_object"})
    for text, allowed in (("[", False), ('"', False), ("{", True)):
        (token_id,) = tokenizer.encode(text, parse_special=False, add_special=False)
        assert grammar.fork().accept(token_id) == allowed
    for token_id in tokenizer.encode('{"a": [1, null]}', parse_special=False, add_special=False):
        assert not grammar.is_finished
        assert grammar.accept(token_id)
    row = np.zeros((tokenizer.n_vocab + 31) // 32, np.int32)
    grammar.fill_mask(row)
    bits = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
    assert set(bits.tolist()) <= tokenizer.eog_ids and len(bits)


def test_blanks_are_bounded(tokenizer, compiler):
    grammar = compiler.compile({"type": "json_object"})
    assert grammar.accept(*tokenizer.encode("{", parse_special=False, add_special=False))
    (newline,) = tokenizer.encode("\n", parse_special=False, add_special=False)
    assert grammar.accept(newline)
    assert not grammar.accept(newline)


def test_any_text_needs_no_grammar(compiler):
    assert compiler.compile(None) is None
    assert compiler.compile({"type": "text"}) is None


def test_requests_do_not_share_their_place(tokenizer, compiler):
    response_format = schema_format({"type": "string", "enum": ["one", "two"]})
    first, second = compiler.compile(response_format), compiler.compile(response_format)
    text = generate(tokenizer, first, 1)
    assert first.is_finished and not second.is_finished
    third = second.fork()
    assert {generate(tokenizer, g, 1) for g in (second, third)} == {text}


@pytest.mark.parametrize(
    "response_format, words",
    [
        ([], "must be an object"),
        ({}, "response_format.type"),
        ({"type": "xml"}, "not 'xml'"),
        ({"type": "json_schema"}, "response_format.json_schema must"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "json_schema.schema must"),
        (schema_format(True), "json_schema.schema must"),
        (schema_format({"type": "foo"}), "foo"),
        (schema_format({"type": "string", "pattern": "("}), "regex"),
        (schema_format({"type": "integer", "minimum": 5, "maximum": 1}), "minimum"),
        (schema_format({"$ref": "http://x/y"}), "http://x/y"),
        (schema_format({"anyOf": [{"$ref": "#"}]}), "enforced"),
        (schema_format({"enum": ["x" * MAX_CHARS]}), "characters"),
    ],
)
def test_bad_formats_are_named(compiler, response_format, words):
    with pytest.raises(ValueError, match="response_format") as error:
        compiler.compile(response_format)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "(a{1,1000}){1,1000}"},
        {"type": "string", "pattern": "^(([a-z]+)+)+$"},
        {"type": "string", "pattern": "(.*a){40}.{40}b"},
        {"type": "string", "minLength": 10**9},
        {"type": "array", "items": {"type": "integer"}, "minItems": 10**6, "maxItems": 10**9},
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}},
        {"enum": list(range(20000))},
    ],
    ids=str,
)
def test_hostile_schemas_end_soon(tokenizer, compiler, schema):
    start = time.process_time()
    try:
        generate(tokenizer, compiler.compile(schema_format(schema)), 0, limit=10)
    except ValueError as error:
        assert "response_format" in str(error)
    assert time.process_time() - start < 2


def test_threads_get_working_grammars(tokenizer, compiler):
    texts: list[str] = []

    def work(seed: int) -> None:
        value = random.Random(seed).choice(["red", "green", "blue"])
        grammar = compiler.compile(schema_format({"type": "string", "enum": [value]}))
        texts.append(generate(tokenizer, grammar, seed) + value)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 8 and all(t.count(t.split('"')[1]) == 2 for t in texts)


def test_the_mask_must_fit(compiler):
    grammar = compiler.compile({"type": "json_object"})
    with pytest.raises(TypeError):
        grammar.fill_mask(np.zeros(10, np.int64))
    with pytest.raises(TypeError):
        grammar.fill_mask(np.zeros((2, 20), np.int32)[:, ::2][0])


def test_a_grammar_that_proves_too_complex_names_its_field(tokenizer, compiler):
    """It compiles; what it has read so far then needs too many states."""
    pattern = "(.|\n)*a(.|\n){100}c(.|\n){100}d"
    grammar = compiler.compile({"type": "regex", "regex": pattern, "field": "guided_regex"})
    row = np.zeros((tokenizer.n_vocab + 31) // 32, np.int32)
    with pytest.raises(RequestError, match="guided_regex: it proved too complex") as refused:
        for token_id in tokenizer.encode(
            "abbabaabbbabaacababbbabbabaa" * 40, parse_special=False, add_special=False
        ):
            grammar.fill_mask(row)
            assert grammar.accept(token_id)
    assert (refused.value.field, refused.value.code) == ("guided_regex", "grammar_too_complex")
    with pytest.raises(RequestError):
        grammar.accept(0)
    with pytest.raises(RequestError):
        grammar.fill_mask(row)
    fine = compiler.compile({"type": "regex", "regex": "a+"})
    assert not fine.accept(tokenizer.encode("b", parse_special=False, add_special=False)[0])


def test_a_grammar_that_takes_seconds_is_ended(tokenizer, compiler, monkeypatch):
    """Each of these letters can stand in ever more places of the tree; llguidance would go on for minutes."""
    monkeypatch.setattr(grammar_module, "FIRST_SECONDS", 0.2)
    monkeypatch.setattr(grammar_module, "TOKEN_SECONDS", 0.002)
    grammar = compiler.compile({"type": "grammar", "grammar": 'start: s\ns: "a" | s s | s s s | s s s s'})
    row = np.zeros((tokenizer.n_vocab + 31) // 32, np.int32)
    (token_id,) = tokenizer.encode("a", parse_special=False, add_special=False)
    with pytest.raises(RequestError, match=r"too complex .* s for \d+ tokens") as refused:
        for _ in range(500):
            grammar.fill_mask(row)
            assert grammar.accept(token_id)
    assert refused.value.code == "grammar_too_complex"


RULES = {  # each names the next: the longest chain that fits into MAX_CHARS
    "rules": ("start: a0\n", "a{i}: a{j}\n", 'a{i}: "x"'),
    "terminals": ("start: A0\n", "A{i}: A{j}\n", 'A{i}: "x"'),
    "options": ("start: a0\n", "a{i}: a{j}?\n", 'a{i}: "x"'),
}


@pytest.mark.parametrize("kind", RULES)
def test_a_long_chain_of_rules_overflows_no_stack(tokenizer, compiler, kind):
    """On a thread's usual stack this ends the process, and with it the server."""
    first, rule, last = RULES[kind]
    count = MAX_CHARS // 16
    lark = first + "".join(rule.format(i=i, j=i + 1) for i in range(count)) + last.format(i=count)
    done: list = []

    def use() -> None:  # as the server does: compiled in one thread, used and forgotten in others
        grammar = compiler.compile({"type": "grammar", "grammar": lark})
        row = np.zeros((tokenizer.n_vocab + 31) // 32, np.int32)
        grammar.fill_mask(row)
        (token_id,) = tokenizer.encode("x", parse_special=False, add_special=False)
        done.append(grammar.accept(token_id))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert done == [True]


def test_errors_come_from_the_deep_stack_as_they_are():
    assert on_deep_stack(lambda: 3) == 3
    with pytest.raises(KeyError, match="why"):
        on_deep_stack(lambda: {}["why"])
    assert threading.stack_size() == 0
