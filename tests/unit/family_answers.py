"""Answers as the families of models write them, and what is in them: (text, reasoning, calls)."""

from __future__ import annotations

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "options": {"type": "object"},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {}}},
]
PARIS, NOW = ("get_weather", {"city": "Paris"}), ("now", {})

HERMES = "{{ tools }}<tool_call></tool_call>"
QWEN3 = HERMES + "<think></think>"
CODER = HERMES + "<function="
GLM = HERMES + "<arg_key><think></think>"
LLAMA3 = '{{ tools }} ipython "parameters"'
MISTRAL, MISTRAL_NAMED = "{{ tools }}[TOOL_CALLS]", "{{ tools }}[TOOL_CALLS][ARGS]"
HARMONY = "{{ tools }}<|start|><|channel|><|message|>"
DEEPSEEK = "{{ tools }}<｜tool▁call▁begin｜></think><think>"
KIMI, COHERE = "{{ tools }}<|tool_call_begin|>", "{{ tools }}<|START_ACTION|><|END_THINKING|>"
LISTED, NEMOTRON = "{{ tools }}<|tool_call|>", "{{ tools }}<TOOLCALL>"
GEMMA = "{{ tools }}<|tool_call><tool_call|><channel|>"
SEED = "{{ tools }}<seed:tool_call></seed:think>"
GENERIC = "{{ messages[0]['tools'] }}<tool_call>"

ANSWERS = {
    "hermes": (
        HERMES,
        'Sure.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        ("Sure.", "", [PARIS, NOW]),
    ),
    "hermes, two objects in one tag": (
        HERMES,
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}\n{"name": "now"}</tool_call>',
        ("", "", [PARIS, NOW]),
    ),
    "hermes, arguments first, as a string": (
        HERMES,
        '<tool_call>{"arguments": "{\\"city\\": \\"Paris\\"}", "name": "get_weather"}</tool_call>',
        ("", "", [PARIS]),
    ),
    "hermes, null arguments": (HERMES, '<tool_call>{"name": "now", "arguments": null}', ("", "", [NOW])),
    "hermes, brackets in strings": (
        HERMES,
        '<tool_call>{"name": "get_weather", "arguments": {"city": "}]\\"</tool_call>\\\\"}}</tool_call>',
        ("", "", [("get_weather", {"city": '}]"</tool_call>\\'})]),
    ),
    "hermes, no call after all": (
        HERMES,
        "A <tool_call> is a tag.\nSee <tool_call>{}</tool_call>!",
        ("A <tool_call> is a tag.\nSee <tool_call>{}</tool_call>!", "", []),
    ),
    "hermes, text behind": (
        HERMES,
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n\nDone. ',
        ("Done.", "", [NOW]),
    ),
    "hermes, a bracket missing": (
        HERMES,
        '<tool_call>{"name": "now", "arguments": {}</tool_call>\n<tool_call>{"name": "now"</tool_call>',
        ("", "", [NOW, NOW]),
    ),
    "hermes, brackets missing in the arguments": (
        HERMES,
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris", "options": {"a": [1</tool_call>ok',
        ("ok", "", [("get_weather", {"city": "Paris", "options": {"a": [1]}})]),
    ),
    "hermes, a bracket too many": (
        HERMES,
        '<tool_call>{"name": "now", "arguments": {}}}</tool_call>\nok',
        ("ok", "", [NOW]),
    ),
    "hermes, code behind": (
        HERMES,
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n`x` or\n```\ny\n```',
        ("`x` or\n```\ny\n```", "", [NOW]),
    ),
    "hermes, line breaks in strings": (
        HERMES,
        '<tool_call>{"name": "get_weather", "arguments": {"city": "a\n\tb\\\nc\\\\"}}</tool_call>',
        ("", "", [("get_weather", {"city": "a\n\tb\nc\\"})]),
    ),
    "generic, fenced": (GENERIC, '```json\n{"name": "now", "arguments": {}}\n```\nok', ("ok", "", [NOW])),
    "qwen-coder, other types": (
        CODER,
        '<tool_call><function=get_weather><parameter=days>"5"</parameter><parameter=options>'
        "{'a': [True, None, 'x\\d']}</parameter></function></tool_call>"
        "<tool_call><function=get_weather><parameter=days>5.0</parameter><parameter=units>1e999</parameter>"
        "</function></tool_call>",
        (
            "",
            "",
            [
                ("get_weather", {"days": 5, "options": {"a": [True, None, "x\\d"]}}),
                ("get_weather", {"days": 5, "units": "1e999"}),
            ],
        ),
    ),
    "qwen-coder, a closing tag in JSON": (
        CODER,
        '<tool_call><function=get_weather><parameter=options>{"a": "</parameter></function>"}</parameter>'
        "</function></tool_call>",
        ("", "", [("get_weather", {"options": {"a": "</parameter></function>"}})]),
    ),
    "qwen-coder, a closing tag behind a quote": (
        CODER,
        '<tool_call><function=get_weather>\n<parameter=options>{"a": "b</parameter>\n'
        '<parameter=units>"c</parameter>\n<parameter=city>x</parameter></function></tool_call>ok',
        ("ok", "", [("get_weather", {"options": '{"a": "b', "units": '"c', "city": "x"})]),
    ),
    "glm, a closing tag behind a quote, to the end": (
        GLM,
        '<think></think><tool_call>get_weather<arg_key>options</arg_key><arg_value>["b</arg_value>'
        "<arg_key>city</arg_key><arg_value>x</arg_value></tool_call>",
        ("", "", [("get_weather", {"options": '["b', "city": "x"})]),
    ),
    "harmony, line breaks in strings": (
        HARMONY,
        '<|channel|>commentary to=functions.get_weather<|message|>{"city": "a\nb"}\n<|call|>'
        "<|start|>assistant<|channel|>commentary to=functions.now<|message|> <|call|>",
        ("", "", [("get_weather", {"city": "a\nb"}), NOW]),
    ),
    "kimi, thoughts that do not end": (
        KIMI + "<think></think>",
        "<think>hm<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>"
        "{}<|tool_call_end|><|tool_calls_section_end|>",
        ("", "hm", [NOW]),
    ),
    "gemma, marks in JSON's strings": (
        GEMMA,
        '<|tool_call>call:get_weather{"city":"<|x\n<|\\"|>",days:3}<tool_call|>',
        ("", "", [("get_weather", {"city": '<|x\n<|"|>', "days": 3})]),
    ),
    "qwen3": (
        QWEN3,
        '<think>\nThey ask for <tool_call>s.\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n'
        "</tool_call>",
        ("", "They ask for <tool_call>s.", [NOW]),
    ),
    "qwen3, empty thoughts": (QWEN3, "<think>\n\n</think>\n\nHi there", ("Hi there", "", [])),
    "qwen-coder": (
        CODER,
        'I look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nPa"ris\n\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n<parameter=units>\nnull\n</parameter>\n"
        '<parameter=options>\n{"a": [1]}\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        (
            "I look.",
            "",
            [
                ("get_weather", {"city": 'Pa"ris\n', "days": 3, "units": None, "options": {"a": [1]}}),
                NOW,
            ],
        ),
    ),
    "qwen-coder without its outer tag": (
        CODER,
        "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        ("", "", [PARIS]),
    ),
    "qwen-coder in JSON": (
        CODER,
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        ("", "", [PARIS]),
    ),
    "qwen-coder, a value that is no JSON": (
        CODER,
        "<tool_call><function=get_weather><parameter=days>NaN</parameter><parameter=city></parameter>"
        "</function></tool_call>",
        ("", "", [("get_weather", {"days": "NaN", "city": ""})]),
    ),
    "glm": (
        GLM,
        "\n<think>Weather.</think>\nOne moment<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n"
        "<tool_call>now</tool_call>",
        ("One moment", "Weather.", [("get_weather", {"city": "Paris", "days": 2}), NOW]),
    ),
    "llama3": (LLAMA3, '{"name": "get_weather", "parameters": {"city": "Paris"}}', ("", "", [PARIS])),
    "llama3, several": (
        LLAMA3,
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; '
        '{"name": "now", "parameters": {}}',
        ("", "", [PARIS, NOW]),
    ),
    "llama3, JSON of another kind": (
        LLAMA3,
        '{"name": "Ada", "parameters": [1, 2]} is JSON.',
        ('{"name": "Ada", "parameters": [1, 2]} is JSON.', "", []),
    ),
    "llama3, an answer": (LLAMA3, "``` `x` ```", ("``` `x` ```", "", [])),
    "mistral": (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "012345678"}, '
        '{"name": "now", "arguments": {}}]',
        ("", "", [PARIS, NOW]),
    ),
    "mistral, named": (
        MISTRAL_NAMED,
        'So:[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[CALL_ID]012345678[ARGS]{}',
        ("So:", "", [PARIS, NOW]),
    ),
    "harmony": (
        HARMONY,
        "<|channel|>analysis<|message|>Weather.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I look.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        '<|constrain|>json<|message|>{"city": "Paris"}<|call|><|start|>assistant to=functions.now'
        "<|channel|>commentary json<|message|><|call|>",
        ("I look.", "Weather.", [PARIS, NOW]),
    ),
    "harmony, an answer": (
        HARMONY,
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>a < b<|return|>",
        ("a < b", "Hm", []),
    ),
    "deepseek": (
        DEEPSEEK,
        "Yes.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("Yes.", "", [PARIS, NOW]),
    ),
    "kimi": (
        KIMI,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        ("", "", [PARIS, NOW]),
    ),
    "cohere": (
        COHERE,
        "<|START_THINKING|>I look.<|END_THINKING|><|START_ACTION|>[\n"
        '    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}},\n'
        '    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
        ("", "I look.", [PARIS, NOW]),
    ),
    "cohere, an answer": (COHERE, "<|START_RESPONSE|>Hi.<|END_RESPONSE|>", ("Hi.", "", [])),
    "gemma": (
        GEMMA,
        '<|channel>thought\nHm.\n<channel|>Ok.<|tool_call>call:get_weather{city:<|"|>"Pa"<r\n<|"|>,days:-2.5e1,'
        'units:null,options:{<|"|>a b<|"|>:[1,true,x y],"c":"}\\"<|"}}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
        (
            "Ok.",
            "Hm.",
            [
                (
                    "get_weather",
                    {
                        "city": '"Pa"<r\n',
                        "days": -25.0,
                        "units": None,
                        "options": {"a b": [1, True, "x y"], "c": '}"<|'},
                    },
                ),
                NOW,
            ],
        ),
    ),
    "seed": (
        SEED,
        "<seed:think>Hm.</seed:think>\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n"
        "</function>\n</seed:tool_call>",
        ("", "Hm.", [PARIS]),
    ),
    "nemotron": (
        NEMOTRON,
        '<TOOLCALL>[{"name": "now", "arguments": {}}]</TOOLCALL>',
        ("", "", [NOW]),
    ),
    "listed": (
        LISTED,
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|/tool_call|>',
        ("", "", [PARIS]),
    ),
    "generic": (
        GENERIC,
        '```json\n{"tool_calls": [{"name": "get_weather", "arguments": {"city": "Paris"}}, '
        '{"type": "function", "function": {"name": "now", "arguments": {}}}]}\n```',
        ("", "", [PARIS, NOW]),
    ),
    "generic, an answer in JSON": (GENERIC, '[{"city": "Paris"}] ok', ('[{"city": "Paris"}] ok', "", [])),
    "generic, in tags": (
        GENERIC,
        'ok <tool_call>{"name": "now", "arguments": {}}</tool_call>',
        ("ok", "", [NOW]),
    ),
}
