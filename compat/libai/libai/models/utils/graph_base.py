# Nothing is to be edited here: this file stands where scripts for LiBai edit it; nothing reads it.
# 这里不用修改：没有程序读取本文件，它只是放在脚本要修改的位置。
#
# Where a script switches OneFlow's straighten algorithm, which orders the kernels of its graph:
# there is no such graph here, and a run is the same with and without.
