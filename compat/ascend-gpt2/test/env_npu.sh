#!/usr/bin/env bash
# What the published training scripts source before run.py: CANN's environment, where it is installed.
cann=$(sed -n "s/^Install_Path=//p" /etc/Ascend/ascend_cann_install.info 2> /dev/null || true)
for folder in ascend-toolkit nnae; do
    if [[ -f ${cann:-/usr/local/Ascend}/$folder/set_env.sh ]]; then
        # shellcheck source=/dev/null
        source "${cann:-/usr/local/Ascend}/$folder/set_env.sh"
        break
    fi
done
export HCCL_CONNECT_TIMEOUT=1800 HCCL_EXEC_TIMEOUT=1200 HCCL_WHITELIST_DISABLE=1
