#!/bin/sh
# Runs the tests of locking on each server that tools/servers.sh has. Arguments: names of servers;
# without any, all of them.
set -eu
cd "$(dirname "$0")/.."

groups='contract:: wait:: hold:: lose:: quorum::'
tested=0 failed=''
list=$(mktemp)
trap 'rm -f "$list"' EXIT
tools/servers.sh >"$list"
while read -r name path; do
    case " ${*:-$name} " in *" $name "*) ;; *) continue ;; esac
    echo "matrix: $("$path" --version)"
    # shellcheck disable=SC2086
    if DISTLOCK_TEST_SERVER=$path \
        cargo test --workspace --all-features --test it -- $groups </dev/null
    then
        tested=$((tested + 1))
    else
        failed="$failed $name"
    fi
done <"$list"
echo "matrix: passed on $tested servers${failed:+; FAILED on$failed}"
[ -z "$failed" ]
