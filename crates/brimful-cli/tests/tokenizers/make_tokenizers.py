"""Makes folders of small tokenizers of each kind, and writes what transformers makes of texts and conversations with them.

Usage: make_tokenizers.py FOLDER. Each subfolder gets a config.json, the tokenizer's files, and reference.json.
"""

import json
import sys
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer

WORDS = (
    "the quick brown fox jumps over the lazy dog and doesn't stop; Once upon a time there was a model of 12 layers. "
    "Hello? Yes, I am here: what do you want to know about user and assistant, system and tools? "
)
TEXTS = [
    "Hello world",
    " leading and  doubled blanks ",
    "two\nlines\n\n  and an indented one\n",
    "naïve café, €5 — 日本語 🦊",
    "I'll don't 1234567 Über-Größe\tTab",
    "with </s> and <|im_end|> and <s>in it",
    "",
    "e\u0301 combining",
]
# No answer begins with a space: if no token has that character, transformers marks nothing of the answer.
TALKS = [
    [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes, I am here."}],
    [
        {"role": "user", "content": " what\nis  this "},
        {"role": "assistant", "content": "a fox 🦊 jumps\n\nover it."},
        {"role": "user", "content": "so?"},
        {"role": "assistant", "content": "the  lazy dog  "},
    ],
]
LONG = "".join(
    f"{WORDS}\nline {number} of it, {'  indented' * (number % 3)}\n" for number in range(1500)
)


def header_template(begin, start, middle, end, turn_end):
    """A template of messages between header tokens, whose answers are marked or not."""

    def write(mark):
        open_mark, close_mark = ("{% generation %}", "{% endgeneration %}") if mark else ("", "")
        return (
            f"{begin}"
            "{% for message in messages %}"
            f"{start}{{{{ message['role'] }}}}{middle}"
            "{% if message['role'] == 'assistant' %}"
            f"{open_mark}{{{{ message['content'] }}}}{end}{close_mark}"
            f"{{% else %}}{{{{ message['content'] }}}}{end}{{% endif %}}{turn_end}"
            "{% endfor %}"
            f"{{% if add_generation_prompt %}}{start}assistant{middle}{{% endif %}}"
        )

    return write


def inst_template(mark):
    """Llama-2's: instructions in brackets, answers until the end token."""
    open_mark, close_mark = ("{% generation %}", "{% endgeneration %}") if mark else ("", "")
    return (
        "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
        "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}"
        f"{open_mark}{{{{ ' ' + message['content'] + eos_token }}}}{close_mark}"
        "{% endif %}{% endfor %}"
    )


def trimming_template(mark):
    """As Llama-3's: contents are trimmed, and there are neither tools nor documents."""
    header = "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    said = "message['content'] | trim + '<|eot_id|>'"
    asks = "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    none = "{%- if tools is not none or documents is not none %}{{ raise_exception('none') }}{%- endif %}\n"
    if mark:
        return (
            none + "{{- bos_token }}{%- for message in messages %}{{- " + header + " }}"
            "{%- if message['role'] == 'assistant' %}{% generation %}{{- " + said + " }}{% endgeneration %}"
            "{%- else %}{{- " + said + " }}{%- endif %}{%- endfor %}" + asks
        )
    return (
        none + "{%- set loop_messages = messages %}{%- for message in loop_messages %}\n"
        "    {%- set content = " + header + " + " + said + " %}\n"
        "    {%- if loop.index0 == 0 %}\n        {%- set content = bos_token + content %}\n    {%- endif %}\n"
        "    {{- content }}\n{%- endfor %}" + asks
    )


def byte_level(special, split=None):
    tokenizer = Tokenizer(models.BPE())
    own = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    tokenizer.pre_tokenizer = own if split is None else pre_tokenizers.Sequence([split, own])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([WORDS], trainer)
    return tokenizer


def sentencepiece_like():
    """As converted from SentencePiece: ▁ for a blank and before each text, bytes for what it lacks."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    learner.train_from_iterator(
        [WORDS], trainers.BpeTrainer(vocab_size=160, show_progress=False)
    )
    learnt = json.loads(learner.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += [piece for piece, _ in sorted(learnt["vocab"].items(), key=lambda one: one[1])]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    merges = [tuple(merge) for merge in learnt["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def word_piece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[U]", "[A]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator([WORDS], trainer)
    tokenizer.decoder = decoders.WordPiece()
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=ends
    )
    return tokenizer


def written(folder, model_type, tokenizer, told, template, older=False):
    """Writes a folder, and what transformers makes of it with a template whose answers are marked."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if older:
        tokenizer.model.save(str(folder))
    else:
        tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    marked = template(True)
    (folder / "marked.jinja").write_text(marked)
    (folder / "chat_template.jinja").write_text(template(False))
    theirs = AutoTokenizer.from_pretrained(folder)
    theirs.chat_template = marked

    def talked(talk):
        out = theirs.apply_chat_template(
            talk, return_dict=True, return_assistant_tokens_mask=True
        )
        return {"messages": talk, "ids": out["input_ids"], "answers": out["assistant_masks"]}

    reference = {
        "class": type(theirs).__name__,
        "texts": [{"text": text, "ids": theirs(text)["input_ids"]} for text in TEXTS],
        "long": {"text": LONG, "ids": theirs(LONG)["input_ids"]},
        "talks": [talked(talk) for talk in TALKS],
    }
    (folder / "reference.json").write_text(json.dumps(reference))


def main(folder):
    llama3 = pre_tokenizers.Split(
        __import__("tokenizers").Regex(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        "isolated",
    )
    headers = header_template(
        "{{ bos_token }}",
        "<|start_header_id|>",
        "<|end_header_id|>{{ '\\n\\n' }}",
        "<|eot_id|>",
        "",
    )
    special = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer = byte_level(special, llama3)
    begin = ("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|begin_of_text|> $A",
                pair="<|begin_of_text|> $A $B",
                special_tokens=[begin],
            ),
        ]
    )
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
    }
    written(folder / "llama3", "llama", tokenizer, told, headers)
    # A class that contradicts the file.
    told["tokenizer_class"] = "LlamaTokenizerFast"
    written(folder / "llama3_misnamed", "llama", tokenizer, told, trimming_template)

    tokenizer = byte_level(["<|endoftext|>"])
    chat_ml = header_template(
        "", "<|im_start|>", "{{ '\\n' }}", "{{ eos_token }}", "{{ '\\n' }}"
    )
    written(folder / "gpt2", "gpt2", tokenizer, {}, chat_ml)
    told = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "add_prefix_space": True}
    written(folder / "gpt2_older", "gpt2", tokenizer, told, chat_ml, older=True)

    tokenizer = byte_level([])
    added = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in added])
    told = {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": "<|im_end|>"}
    written(folder / "qwen2", "qwen2", tokenizer, told, chat_ml)
    numbers = {
        str(tokenizer.token_to_id(token)): {"content": token, "special": True} for token in added
    }
    told["added_tokens_decoder"] = numbers
    written(folder / "qwen2_older", "qwen2", tokenizer, told, chat_ml, older=True)

    told = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "legacy": False}
    written(folder / "llama2", "llama", sentencepiece_like(), told, inst_template)
    told = {"tokenizer_class": "LlamaTokenizerFast", "legacy": True, "add_eos_token": True}
    written(folder / "llama2_legacy", "llama", sentencepiece_like(), told, inst_template)
    told = {"tokenizer_class": "LlamaTokenizer", "bos_token": {"__type": "AddedToken", "content": "<s>"},
            "eos_token": "</s>"}
    written(folder / "mistral", "mistral", sentencepiece_like(), told, inst_template)

    cards = header_template("[CLS]", "[U] ", " [A] ", "{{ eos_token }}", "")
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "[SEP]", "cls_token": "[CLS]",
            "unk_token": "[UNK]", "pad_token": "[PAD]"}
    written(folder / "word_piece", "llama", word_piece(), told, cards)


main(Path(sys.argv[1]))
