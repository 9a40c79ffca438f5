#!/usr/bin/env bash
# A real SLURM cluster of two "nodes" on this machine, for tests. Needs root, and apt-get for the first start.
#   slurm.sh start [DIR]; . DIR/env; sinfo; ...; slurm.sh stop [DIR]       (DIR: /tmp/llm-train-bench-slurm)
# Debian's packages are unpacked in DIR/debian, nothing is installed. No systemd, munge, cgroups or accounting
# (sacct says "disabled"). Each slurmd has its own host name and /etc/hosts (unshare -um), and tasks inherit
# them. auth/none: who reaches the ports is root here, so the daemons listen on 127.0.0.1. Both nodes have all
# cores of the machine. No GPUs: jobs need --gpus-per-node=0. Jobs of the partition high preempt those of low.
set -euo pipefail
dir=$(realpath -m "${2:-/tmp/llm-train-bench-slurm}")
debian=$dir/debian lib=$dir/debian/usr/lib/$(uname -m)-linux-gnu
start() {
    [ ! -e "$dir/pids" ] || { echo "$dir/pids: runs already" >&2; exit 1; }
    mkdir -p "$dir"/{debs/partial,debian,state,n1,n2}
    if [ ! -x "$debian/usr/sbin/slurmd-wlm" ]; then
        apt-get install -qq --download-only -y --no-install-recommends -o Dir::Cache::archives="$dir/debs" \
            slurmctld slurmd slurm-client slurm-wlm-basic-plugins >"$dir/apt.log" 2>&1
        for deb in "$dir"/debs/*.deb; do dpkg -x "$deb" "$debian"; done
    fi
    cat >"$dir/slurm.conf" <<END
ClusterName=trial
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
PluginDir=$lib/slurm-wlm
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/%n/slurmd.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/%n.log
ReturnToService=2
MinJobAge=3600
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
KillWait=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeAddr=127.0.0.1 Port=16818 CPUs=$(nproc)
NodeName=n2 NodeAddr=127.0.0.1 Port=16819 CPUs=$(nproc)
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL MaxTime=INFINITE PriorityTier=2 PreemptMode=OFF
END
    cat >"$dir/env" <<END
export SLURM_CONF=$dir/slurm.conf PATH=$debian/usr/bin:$debian/usr/sbin:\$PATH
export LD_LIBRARY_PATH=$lib:$lib/slurm-wlm\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
END
    # shellcheck disable=SC1091
    . "$dir/env"
    setsid slurmctld-wlm -D -i </dev/null >"$dir/slurmctld.out" 2>&1 &
    echo $! >"$dir/pids"
    for node in n1 n2; do
        printf '127.0.0.1 localhost n1 n2 %s\n' "$(hostname)" >"$dir/hosts"
        # shellcheck disable=SC2016
        setsid unshare -um bash -c 'hostname $1; mount --bind "$2/hosts" /etc/hosts
            exec slurmd-wlm -D -N $1 -d "$2/debian/usr/sbin/slurmstepd-wlm"' bash $node "$dir" </dev/null >"$dir/$node.out" 2>&1 &
        echo $! >>"$dir/pids"
    done
    mapfile -t pids <"$dir/pids"
    for _ in $(seq 100); do # until both are idle
        for pid in "${pids[@]}"; do kill -0 "$pid" 2>/dev/null || break 2; done
        [ "$(timeout 2 sinfo -h -p low -t idle -o %D 2>/dev/null)" != 2 ] || return 0
        sleep 0.1
    done
    timeout 2 sinfo -N >&2 || true
    tail -n 5 "$dir"/*.out >&2
    stop
    exit 1
}
stop() {
    [ -e "$dir/pids" ] || return 0
    # shellcheck disable=SC1091
    . "$dir/env"
    timeout 5 scancel --user root || true
    for _ in $(seq 400); do [ -n "$(timeout 2 squeue -h 2>/dev/null)" ] || break; sleep 0.1; done # KillWait
    mapfile -t pids <"$dir/pids"
    kill "${pids[@]}" 2>/dev/null || true
    for _ in $(seq 100); do kill -0 "${pids[@]}" 2>/dev/null || break; sleep 0.1; done
    kill -KILL "${pids[@]}" 2>/dev/null || true
    rm -rf "$dir"/{pids,state,n1,n2}
}
"${1:?start or stop}"
