# Nothing is to be edited here: this file stands where guides to LiBai open it; nothing reads it.
# 这里不用修改：没有程序读取本文件，它只是放在教程让人打开的位置。
#
# Where a guide comments out the saving of the model (hooks.PeriodicCheckpointer):
#
#   tools/args_libai_gpt2.sh, ours or OneAutoTest's     saves no model by itself
#   tools/train.sh, tools/train_net.py                  give train.checkpointer.period=0
