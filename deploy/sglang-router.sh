#!/bin/sh
# sglang-router 0.3 in front of pyctl servers; docs/several-servers.md.
# SERVERS are their addresses, HOST and PORT its own; ADMIN_KEY is the key for changing the list of servers.
set -eu
: "${SERVERS:?addresses such as \"http://10.0.0.1:8080 http://10.0.0.2:8080\"}" "${ADMIN_KEY:?any secret}"
# The longest known beginning wins, unless its server has seven requests more than another.
policy="--policy cache_aware --balance-abs-threshold 6 --balance-rel-threshold 1.1"
# A repetition goes to the same server until two checks have found it dead.
health="--worker-startup-check-interval 1 --health-check-interval-secs 1 --health-failure-threshold 2
  --health-success-threshold 1 --retry-max-retries 10"
# A breaker opens at any answer above 499, which one client's requests can cause at all servers.
breaker="--disable-circuit-breaker"
# shellcheck disable=SC2086 # several words
exec sglang-router launch --host "${HOST:-127.0.0.1}" --port "${PORT:-8080}" --worker-urls $SERVERS \
  --control-plane-api-keys "admin:admin:admin:$ADMIN_KEY" $policy $health $breaker \
  --prometheus-host 127.0.0.1 --prometheus-port "${METRICS_PORT:-29000}" --log-level warn
