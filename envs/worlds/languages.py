"""The styles of each language, and the vocabulary that a tokenizer for the short ones needs."""

from __future__ import annotations

import re

from turntree.envs.worlds.chinese import CHINESE_STYLES
from turntree.envs.worlds.speech import Language
from turntree.envs.worlds.styles import STYLES, Style, StyleName

__all__ = ["lexicon", "name_pattern", "name_words", "style_of"]

# Words that agents need beside those of the texts: to plan, and to answer.
_DIGITS = "0123456789"
_AGENT_WORDS: dict[Language, tuple[str, ...]] = {
    "en": ("yes", "no", "find", "answer", "different", "next", "so"),
    "zh": ("是", "否", "的", "查找", "答案", "不同", "不", "缺"),
}
_COMPUTING: dict[Language, str] = {"en": "+ - compute result", "zh": "+ - 计算 结果"}
# The words of the short Chinese templates, which are written without blanks.
_CHINESE = "请|告诉|我|你|想|知道|吗|谁|什么|叫|名字|相同|也|和|在|以前|常|一起|出现|多少|年|岁|相差|找不到|[。？]"


def style_of(name: StyleName, language: Language = "en") -> Style:
    """The style of this name in a language."""
    return (CHINESE_STYLES if language == "zh" else STYLES)[name]


def lexicon(style: StyleName = "short", language: Language = "en") -> tuple[list[str], list[str]]:
    """Every word and every name syllable that a world of a short style can contain, both sorted.

    A text of such a world splits at blanks (Chinese: anywhere) into these words and into names, whose words are two
    syllables each; of the ``dated`` style also into numbers, whose digits are words here, as are the signs that a
    computation needs. The ``vague`` style adds the words that stand for several relations.
    """
    used = style_of(style, language)
    speech = used.speech
    frames = [t for f in used.frames.values() for t in (*f.who, *f.what, *f.yes_no)]
    texts = [*frames, used.fact, used.former, used.mention, speech.of.replace("{r}", " ").replace("{x}", " ")]
    if used.year:
        coded = [t for f in used.frames.values() for wordings in f.code.values() for t in wordings]
        texts += [*coded, used.year]
    words = {w for text in texts for w in _words(text, language)}
    if used.year:
        words.update(*(y.split() for y in speech.years.values()), _DIGITS, _COMPUTING[language].split())
    if used.vague:
        words.update(speech.vague.values(), _words(used.nothing, language))
    words.update(_AGENT_WORDS[language], speech.kinds.values(), speech.relations.values())
    return sorted(words), sorted(used.inventory.syllables)


def _words(template: str, language: Language) -> list[str]:
    """What stands between the placeholders of a template, cut into words where no blanks are."""
    if language == "en":
        return [w for w in template.split() if "{" not in w]
    known = "|".join((*sorted(_AGENT_WORDS[language], key=len, reverse=True), _CHINESE))
    return re.findall(f"{known}|\\w+|[^\\w\\s]", re.sub(r"\{\w+\}", " ", template))


def name_words(language: Language = "en") -> list[str]:
    """Every word that a name of the short style can contain, sorted."""
    return sorted(word for side in style_of("short", language).inventory.words() for word in side)


def name_pattern(language: Language = "en") -> re.Pattern[str]:
    """Finds what looks like a name of a world: capitalised words in a row; in Chinese by the characters of names."""
    if language == "en":
        return re.compile(r"\b[A-Z]\w*(?: [A-Z]\w*)+")
    inventory = style_of("prose", "zh").inventory
    word = f"[{''.join(inventory.starts)}][{''.join(inventory.middles)}]?[{''.join(inventory.ends)}]"
    return re.compile(f"《[^》]+》|{word}·?{word}(?:市|集团|学院| FC|共和国)?")
