"""Makes the tiny Llama that the real-vLLM tests serve: random weights of a fixed seed, a token a byte, no download.

Runs inside the vLLM environment (it needs torch, transformers and tokenizers), as `python make_model.py SIZE FOLDER`;
`environment.py` calls it. The weights mean nothing; what the tests need of them is only that every step costs what
a step of that shape costs.
"""

import argparse
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEED = 20_260_801
VOCABULARY = 320  # 256 bytes, five tokens with a meaning, and ids that decode to nothing
CONTEXT = 32_768  # tokens
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '[' + message['role'] + ']' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Size:
    """A model's shape: width of the hidden state and of the MLP, layers, heads, KV heads."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int


SIZES = {
    "tiny": Size(hidden=256, intermediate=768, layers=4, heads=8, kv_heads=2),
    "small": Size(hidden=512, intermediate=1_536, layers=8, heads=8, kv_heads=2),
}


def byte_tokenizer() -> Any:
    """A byte-level BPE tokenizer without merges: one token a byte, and a few of meaning."""
    tokenizers = importlib.import_module("tokenizers")
    transformers = importlib.import_module("transformers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<s>", "</s>", "<pad>", *alphabet])}
    raw = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens(["<think>", "</think>"])  # what vLLM's reasoning parsers look for
    return tokenizer


def make(size: Size, directory: Path) -> int:
    """Writes weights, configuration and tokenizer into `directory`; returns the number of parameters."""
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    torch.manual_seed(SEED)
    configuration = transformers.LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(configuration).to(torch.bfloat16)
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return int(sum(parameter.numel() for parameter in model.parameters()))


def main() -> None:
    """`make_model.py SIZE DIRECTORY`: prints how many parameters were written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", choices=sorted(SIZES))
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    parameters = make(SIZES[arguments.size], arguments.directory)
    print(f"{arguments.size}: {parameters:,} parameters in {arguments.directory}")


if __name__ == "__main__":
    main()
