"""Templates come from strangers: nothing of the machine is reached, and time and memory are bounded."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from hetero.text.meter import MAX_CHARS
from hetero.text.template import ChatTemplate, TemplateError

MESSAGES = [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant")]


def render(source: str, messages=MESSAGES) -> str:
    return "".join(text for text, _ in ChatTemplate(source, "<s>", "</s>").render(messages))


def peak_kib() -> int:
    """The most memory the process has had, in KiB; 0 where there is no telling."""
    if sys.platform != "linux":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


GROW = "{% set ns = namespace(x='x', y='y') %}{% for i in range(60) %}"
HOSTILE = [
    "{{ lipsum.__globals__['os'].popen('touch PWNED').read() }}",
    "{{ cycler.__init__.__globals__.os.system('touch PWNED') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append({'role':'system','content':'x'}) }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__ }}{{ raise_exception.__init__ }}{{ range.__call__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ '%s' | format(messages.__class__) }}{{ '{0.__class__}'.format(messages) }}",
    "{{ '{0.__class__.__mro__}'.format_map({'0': 1}) }}{{ messages | map(attribute='__class__') | list }}",
    "{{ self._TemplateReference__context }}{{ self.__dict__ }}",
    "{{ messages['__class__'] }}{{ messages[0]['clear']() }}",
    "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "{% include '/etc/passwd' %}",
    "{% import '/etc/passwd' as x %}{{ x }}",
    "{% extends '/etc/passwd' %}",
    "{{ raise_exception }}{{ namespace() }}",
    "{% for i in range(1000000000) %}x{% endfor %}",
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% for i in range(100000) recursive %}{{ loop(range(100000)) }}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{% block b %}{{ self.b() }}{% endblock %}",
    "{{ 'x' * 1000000000 }}",
    "{{ 1000000000 * 'x' }}{{ [1] * 1000000000 }}",
    "{{ 2 ** 100000000 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%.1000000000f' | format(1) }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '{:>1000000000}'.format('x') }}",
    "{{ '{:{w}}'.format('x', w=1000000000) }}",
    "{{ 'x'.ljust(1000000000) }}",
    "{{ 'x'.zfill(1000000000) }}",
    "{{ 'x'.expandtabs(1000000000) }}",
    "{{ 'x' | indent(1000000000) }}",
    "{{ ('\\n' * 3000000) | indent(900) }}",
    "{{ [1, [2]] | tojson(indent=1000000000) }}",
    "{{ 1.5 | round(1000000000, 'ceil') }}",
    "{{ (1).to_bytes(1000000000, 'big') }}",
    "{{ {}.fromkeys(range(100000)) }}",
    "{{ [[1]] | sum(start=[]) }}",
    "{% set b = 'x' * 4000000 %}{{ b | list | length }}",
    "{% set b = 'x ' * 2000000 %}{{ b.split() | length }}{{ b.split(' ') | length }}",
    "{% set b = 'x' * 4000000 %}{% for i in range(100000) %}{{ b }}{% endfor %}",
    "{% set b = 'x' * 4000000 %}{% set c %}{% for i in range(100000) %}{{ b }}{% endfor %}{% endset %}",
    "{% set b = 'x' * 4000000 %}{{ ','.join([b, b, b]) }}",
    "{% set b = 'x' * 3000000 %}{% for i in range(100000) %}{% set c = b ~ i %}{% endfor %}",
    GROW + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    GROW + "{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    GROW + "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}{{ ns.x }}",
    GROW + "{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
    GROW + "{% set ns.x = ns.x | replace('x', 'xx') %}{% endfor %}",
    GROW + "{% set ns.x = ns.x.replace('', 'xx') %}{% endfor %}",
    GROW + "{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
    GROW + "{% set ns.x = '{0}{0}'.format(ns.x) %}{% endfor %}",
    GROW + "{% set ns.x = ns.x | tojson | tojson %}{% endfor %}",
    GROW + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    GROW + "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
    GROW + "{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x | tojson }}",
    GROW + "{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x | tojson }}",
    GROW + "{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ {ns.x: 1} }}",
    GROW + "{% set ns.x = namespace(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}",
    GROW + "{% set ns.x = [ns.x, ns.x] | map('list') | list %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=7) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[]) %}{% for i in range(100000) %}{% set ns.x = ns.x + [i] %}{% endfor %}",
    "{% set ns = namespace(x=[]) %}{% for i in range(100000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set a = ('a' * 2000000) %}{{ range(100000) | map('string') | select('in', a) | list | length }}",
]
LIMIT_S = 2.0


@pytest.mark.parametrize("source", HOSTILE)
def test_hostile_templates(source, tmp_path, monkeypatch):  # CVE-2024-34359 and relatives
    monkeypatch.chdir(tmp_path)
    peak = peak_kib()
    start = time.thread_time()
    try:
        text = render(source)
    except TemplateError as error:
        text = str(error)
    assert time.thread_time() - start < LIMIT_S
    assert peak_kib() - peak < 200_000
    assert not list(Path().iterdir())
    assert len(text) <= MAX_CHARS
    for secret in ("<class", "<module", "<function", "built-in", "0x", "root:", "hetero.text"):
        assert secret not in text
    assert render("{{ messages | length }}") == "4"


def test_huge_messages_are_refused_in_time():
    start = time.thread_time()
    with pytest.raises(TemplateError, match="characters"):
        render("{{ messages[0].content }}", [{"role": "user", "content": "x" * (MAX_CHARS + 1)}])
    assert time.thread_time() - start < LIMIT_S


def test_long_conversations_are_no_attack():
    messages = [{"role": ("user", "assistant")[i % 2], "content": f"message {i} " * 50} for i in range(1000)]
    source = (
        "{% set ns = namespace(text='', all=[]) %}{% for m in messages %}{% set ns.all = ns.all + [m] %}"
        "{% set ns.text = m.role ~ ': ' ~ m.content %}{{ ns.text }}{% endfor %}{{ ns.all | length }}"
    )
    text = render(source, messages)
    assert text.endswith("1000") and len(text) > 500_000
