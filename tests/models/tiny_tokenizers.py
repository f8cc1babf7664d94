"""Tokenizers built in memory: byte-level, with and without a token that begins a text, and with word pieces."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ '[' + message['role'] + ']' + message['content'] + '[/]' }}{% endif %}{% endfor %}"
)
UNSTABLE = (  # earlier turns of the assistant lose their text
    "{% for message in messages %}{{ message['role'] + ':' }}"
    "{% if loop.last %}{{ message['content'] }}{% endif %}{{ '\n' }}{% endfor %}"
)


def tokenizer(template: str | None = None, *, begins: bool = False, metaspace: bool = False) -> PreTrainedTokenizerFast:
    """Some 300 tokens: bytes, special ones and a few words; with `begins` it starts each text with ``<s>``."""
    tokens = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    made = Tokenizer(models.BPE())
    if metaspace:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        made.decoder = decoders.Metaspace(prepend_scheme="first")
        alphabet = [chr(code) for code in range(33, 127)] + ["▁", "\n", "é"]
    else:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=tokens, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(["what is this a cat and a dog user assistant system USER ASSISTANT"] * 2, trainer)
    if begins:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    found = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    found.chat_template = template
    return found
