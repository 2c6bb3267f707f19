# Nothing is to be edited here: this file stands where guides to Megatron-LM name it, and nothing
# reads it. 这里不用修改：没有程序读取本文件，它只是放在教程提到的位置。
#
# In Megatron-LM it fetched vocabularies and kept them. Here nothing is fetched by itself: give
# --vocab-file gpt2-vocab.json and --merge-file gpt2-merges.txt, as its scripts do. Both are at
# https://s3.amazonaws.com/models.huggingface.co/bert/ and are kept beside the data that
# tools/preprocess_data.py makes.
#
# tools/openwebtext/merge_data.py, which the guides name beside it, is in this folder's tools/.
