"""What the command shows without a prompts file."""

from infer import demo
from tests.infer.conftest import BLOCK, LIMIT


def test_built_in_prompts(command, quick_compile):
    assert command.bare(*command.given, "--max-new-tokens", str(LIMIT)) == 0
    for temperature, prompts in (("0", 1), ("0.7", 2), ("1", 1)):
        said = f"temperature {temperature}: {LIMIT} tokens in "
        assert command.out.count(said) == prompts
    assert "  | def is_absolute(path):" in command.out
    assert f"tokens/s with {BLOCK} drafts a round, " in command.out
    assert "speed-up " in command.out
    assert command.err.startswith("4 slots of ")
    assert command.err.count("\n") == 1


def test_lines_are_numbered_and_have_the_limit():
    found = demo.lines(LIMIT)
    assert [(x.number, x.id) for x in found] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    for line, prompt in zip(found, demo.PROMPTS, strict=True):
        assert line.fields == prompt | {"max_new_tokens": LIMIT}
        assert line.error is None


def test_lines_have_a_limit_of_their_own():
    found = demo.lines(demo.MOST_TOKENS + 1)
    assert {x.fields["max_new_tokens"] for x in found} == {demo.MOST_TOKENS}
