"""LiBai's defaults of the data and the vocabulary."""

from libai.config import LazyCall
from libai.data import build_nlp_train_val_test_loader
from libai.data.data_utils import get_indexed_dataset
from libai.data.datasets import GPT2Dataset
from libai.tokenizer import GPT2Tokenizer

tokenization = dict(append_eod=False, make_vocab_size_divisible_by=128)
tokenization.tokenizer = LazyCall(GPT2Tokenizer)(
    vocab_file="gpt2-vocab.json", merges_file="gpt2-merges.txt"
)
tokenization.tokenizer.update(do_lower_case=True, do_chinese_wwm=True)

tokens = LazyCall(get_indexed_dataset)(
    data_prefix="my-gpt2_text_document", data_impl="mmap", skip_warmup=False
)
dataset = LazyCall(GPT2Dataset)(
    name="gpt-2", data_prefix=tokens.data_prefix, indexed_dataset=tokens
)
dataset.update(max_seq_length=1024, seed=1234)

dataloader = dict(train=LazyCall(build_nlp_train_val_test_loader)(dataset=[dataset], num_workers=4))
dataloader.train.update(train_val_test_num_samples=None, splits=[[949.0, 50.0, 1.0]], weights=[1.0])
