#!/bin/sh
# Profile a GPU step by step: `make profile-gpu` sets the variables and says what they mean.
set -u

status=0
say() { printf '\n== %s\n' "$*" >&2; }
try() { "$@" || { status=$?; say "failed: $*"; }; }
flags() { flag=$1; shift; for value in "$@"; do printf ' %s %s' "$flag" "$value"; done; }

mkdir -p "$FOLDER"
if [ -e "$DATASET/_manifest.json" ] && [ ! -e "$FOLDER/home/catalog.duckdb" ]; then
	say "what $DATASET has"
	try $FORETOKEN catalog import parquet "$DATASET"
fi

plan="--device $DEVICE $(flags --model $MODELS) --tp $TP_SIZES --training $ARGS"
say "operators, at most $CAP_S s"
try $FORETOKEN profile $plan --time-cap-s "$CAP_S"

export_rows() {
	rm -rf "$FOLDER/dataset.new"
	$FORETOKEN catalog export parquet "$FOLDER/dataset.new" --where "device=$DEVICE" &&
		rm -rf "$FOLDER/dataset" && mv "$FOLDER/dataset.new" "$FOLDER/dataset"
}
say "rows so far"
try export_rows

if [ ! -e "$FOLDER/host.json" ]; then
	say "host"
	try_host() {
		$FORETOKEN --output json profile host --device "$DEVICE" --quick > "$FOLDER/host.new" &&
			mv "$FOLDER/host.new" "$FOLDER/host.json"
	}
	try try_host
fi

for model in $CLOSURE_MODELS; do
	name=${model%:*}
	if [ ! -e "$FOLDER/closure-$name.json" ]; then
		say "whole steps of $name, at most about $CLOSURE_CAP_S s"
		try $FORETOKEN profile closure "$name" --device "$DEVICE" --layers "${model##*:}" --quick \
			$(flags --step $CLOSURE_STEPS) --time-cap-s "$CLOSURE_CAP_S" --out "$FOLDER/closure-$name.json"
	fi
done

say "all rows"
try export_rows
say "what is left"
try $FORETOKEN profile plan $plan
du -sh "$FOLDER/dataset" >&2
exit $status
