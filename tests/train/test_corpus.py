import ast

from train import corpus


def test_held_out_files_are_apart_from_the_rest():
    rest, held_out = corpus.stdlib_texts(), corpus.stdlib_texts(held_out=True)
    assert len(held_out) == len(corpus.HELD_OUT)
    assert len(rest) > 300
    assert not set(rest) & set(held_out)
    assert any("class ConfigParser" in text for text in held_out)


def test_tests_and_idle_are_left_out():
    assert not any(
        "from idlelib" in text and "class EditorWindow" in text for text in corpus.stdlib_texts()
    )
    assert not any("class TestCase(unittest.TestCase)" in text for text in corpus.stdlib_texts())


def test_functions_are_asked_by_their_signature():
    function = "def double(x):\n    y = 2 * x\n    return y\n"
    text = f"import os\n\n{function}\nclass A:\n    def f(self):\n        pass\n"
    assert list(corpus.functions(text)) == [
        ("Complete this function:\ndef double(x):\n", "    y = 2 * x\n    return y\n")
    ]


def test_functions_of_long_wrong_or_one_line_sources():
    body = "".join(f"    x{i} = {i}\n" for i in range(300))
    assert list(corpus.functions(f"def long():\n{body}")) == []
    assert list(corpus.functions("def broken(:\n")) == []
    assert list(corpus.functions("def one(): return 1\n")) == []


def test_question_and_answer_are_the_whole_function():
    for text in corpus.stdlib_texts(held_out=True):
        for asked, answer in corpus.functions(text):
            head = asked.removeprefix(f"{corpus.REQUEST}\n")
            assert head + answer in text
            assert ast.parse(head + answer)
