#!/bin/sh
# Runs the tests of locking on each server that tools/servers.sh has, on two servers at a time,
# because the tests mostly wait. Arguments: names of servers; without any, all of them.
set -eu
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
touch "$work/passed" "$work/failed"
tools/servers.sh >"$work/servers"
while read -r name path; do
    case " ${*:-$name} " in *" $name "*) echo "$work $name $path" ;; esac
done <"$work/servers" >"$work/selected"

cargo test --workspace --all-features --test it --no-run
# The output of a server is shown when it is complete.
# shellcheck disable=SC2016
xargs -r -n 3 -P 2 sh -c '
    work=$1 name=$2 DISTLOCK_TEST_SERVER=$3
    export DISTLOCK_TEST_SERVER
    if cargo test --workspace --all-features --test it -- \
        contract:: wait:: hold:: lose:: quorum:: </dev/null >"$work/$name" 2>&1
    then echo "$name" >>"$work/passed"
    else echo "$name" >>"$work/failed"
    fi
    echo "matrix: $("$DISTLOCK_TEST_SERVER" --version)" | cat - "$work/$name"
' sh <"$work/selected"

echo "matrix: passed on $(wc -l <"$work/passed") servers"
if [ -s "$work/failed" ]; then
    echo "matrix: FAILED on $(paste -sd ' ' "$work/failed")"
    exit 1
fi
