"""Questions in SQL that take more than any catalog has, by what they take it with."""

# ruff: noqa: S608 - these are attacks

_DIGITS = "(SELECT string_agg('9', '') AS s FROM range(3000000))"
_LETTERS = "WITH a AS (SELECT string_agg('a', '') AS s FROM range(100000)) "
_LIST = "WITH a AS (SELECT list(i) AS l FROM range(5000000) AS t(i)) "
_MANY = "range(1000000000)"


def _doubling(num_levels: int) -> str:
    """Return a text in which each expression is twice the one before."""
    levels = ["a0 AS (SELECT 1 AS x)"]
    levels += [f"a{n} AS (SELECT * FROM a{n - 1} UNION ALL SELECT * FROM a{n - 1})"
               for n in range(1, num_levels)]  # fmt: skip
    return f"WITH {', '.join(levels)} SELECT count(*) FROM a{num_levels - 1}"


# Those that nothing ended while questions ran in the catalog's own process.
NAMED_RUNAWAYS = {
    "replace": _LETTERS + "SELECT length(replace(s, 'a', s)) FROM a",
    "regexp_replace": _LETTERS + "SELECT length(regexp_replace(s, 'a', s, 'g')) FROM a",
    "bignum": f"SELECT length(s::BIGNUM::VARCHAR) FROM {_DIGITS}",
    "map of itself": "WITH a AS (SELECT list(i) AS l FROM range(3000000) AS t(i))"
    " SELECT cardinality(map(l, l)) FROM a",
    "list by itself": _LIST + f"SELECT len({'||'.join(['l'] * 90)}) FROM a",
}

_TEXT_RUNAWAYS = {
    "repeat": "SELECT length(repeat('x', 4000000000))",
    "repeat of rows": f"SELECT sum(length(repeat('x', 100000000 + i))) FROM {_MANY} AS t(i)",
    "lpad": "SELECT length(lpad('x', 2000000000, 'y'))",
    "rpad": "SELECT length(rpad('x', 2000000000, 'y'))",
    "printf": "SELECT length(printf('%2000000000d', 1))",
    "format": "SELECT length(format('{:2000000000d}', 1))",
    "text by itself": _LETTERS + f"SELECT length({'||'.join(['repeat(s, 10000)'] * 9)}) FROM a",
    "concat": _LETTERS + f"SELECT length(concat({', '.join(['repeat(s, 5000)'] * 20)})) FROM a",
    "string_agg": f"SELECT length(string_agg('xxxxxxxxxxxxxxxx', ',')) FROM {_MANY}",
    "split": _LETTERS + "SELECT len(string_split(repeat(s, 10000), '')) FROM a",
    "split by pattern": _LETTERS + "SELECT len(regexp_split_to_array(repeat(s, 99), '')) FROM a",
    "all matches": _LETTERS + "SELECT len(regexp_extract_all(repeat(s, 9999), '.')) FROM a",
    "hex": _LETTERS + "SELECT length(hex(hex(hex(repeat(s, 9999))))) FROM a",
    "base64": _LETTERS + "SELECT length(to_base64(encode(repeat(s, 30000)))) FROM a",
    "url": "SELECT length(url_encode(url_encode(url_encode(repeat('%', 100000000)))))",
    "translate": _LETTERS + "SELECT length(translate(repeat(s, 30000), 'a', 'bb')) FROM a",
    "edit distance": _LETTERS + "SELECT levenshtein(repeat(s, 9), repeat(s, 8) || 'b') FROM a",
    "similarity": _LETTERS + "SELECT jaro_winkler_similarity(repeat(s, 99), repeat(s, 98)) FROM a",
    "transpositions": _LETTERS + "SELECT damerau_levenshtein(repeat(s, 3), s || 'b') FROM a",
    "glob": f"SELECT repeat('a', 60000) GLOB '{'*a' * 5000}b'",
    "like": f"SELECT repeat('a', 60000) LIKE '{'%a' * 5000}b'",
    "pattern": f"SELECT count(*) FROM {_MANY} AS t(i)"
    " WHERE regexp_matches(repeat('a', 1000) || i, '(a?){500}a{500}$')",
    "compiled patterns": f"SELECT count(*) FROM {_MANY} AS t(i)"
    " WHERE regexp_matches('x', '(x{500}){2}' || i)",
}  # fmt: skip
_LIST_RUNAWAYS = {
    "range": "SELECT len(range(4000000000))",
    "series": "SELECT count(*) FROM (SELECT unnest(generate_series(1, 4000000000)))",
    "resize": "SELECT len(list_resize([1], 4000000000))",
    "sorted": "SELECT len(list_sort(list_transform(range(200000000), lambda x: hash(x))))",
    "lambda": "SELECT list_sum(list_transform(range(100000), lambda x:"
    " list_sum(list_transform(range(100000), lambda y: x * y))))",
    "reduction": "SELECT length(list_reduce(list_transform(range(100000), lambda x: 'abcdefgh'),"
    " lambda x, y: x || x || y))",
    "filter": "SELECT len(list_filter(range(1000000), lambda x:"
    " list_contains(range(1000000), -x)))",
    "product": "SELECT count(*) FROM (SELECT unnest(range(1000000)), i FROM range(1000000) t(i))",
    "zip": _LIST + "SELECT len(list_zip(l || l || l || l || l || l, l || l || l, l, l)) FROM a",
    "flattened": "SELECT len(flatten(list_transform(range(100000), lambda x: range(100000))))",
    "distinct": "SELECT len(list_distinct(list_transform(range(300000000), lambda x: hash(x))))",
    "kept": f"SELECT len(list(i)) FROM {_MANY} AS t(i)",
    "of lists": f"SELECT len(list([i, i, i, i])) FROM {_MANY} AS t(i)",
    "intersected": "SELECT len(list_intersect(range(100000000), range(100000000)))",
    "histogram": f"SELECT cardinality(histogram(hash(i))) FROM {_MANY} AS t(i)",
    "map": f"SELECT cardinality(map_from_entries(list((i, i)))) FROM {_MANY} AS t(i)",
    "bits": "SELECT bit_count(bitstring('1', 2000000000) || bitstring('1', 2000000000))",
    "bits of rows": "SELECT sum(bit_count(bitstring('1', 100000000 + i::INTEGER)))"
    " FROM range(1000000) AS t(i)",
    "blob": "SELECT octet_length(repeat('x', 2000000000)::BLOB || repeat('y', 2000000000)::BLOB)",
}
_NUMBER_RUNAWAYS = {
    "bignum product": "WITH RECURSIVE t(n, x) AS (SELECT 0, 10::BIGNUM UNION ALL"
    " SELECT n + 1, (x::VARCHAR || x::VARCHAR)::BIGNUM FROM t WHERE n < 40) SELECT max(n) FROM t",
    "bignum of rows": "SELECT count(DISTINCT (repeat('9', 50000) || i)::BIGNUM)"
    " FROM range(100000) AS t(i)",
    "decimals": "SELECT sum((i::DECIMAL(38, 10) * 1.0000000001) / 3) FROM range(100000000000) t(i)",
    "edges": "SELECT sum(len(equi_width_bins(0, i, 1000000, false)))"
    " FROM range(1000000, 2000000) AS t(i)",
}
_RELATION_RUNAWAYS = {
    "cross join": f"SELECT count(*) FROM {_MANY} AS a, {_MANY} AS b",
    "cross join kept": "SELECT count(DISTINCT hash(a.range, b.range)) FROM range(100000) AS a,"
    " range(100000) AS b",
    "unequal join": f"SELECT count(*) FROM {_MANY} AS a(i) JOIN {_MANY} AS b(i) ON a.i < b.i",
    "asof join": f"SELECT count(*) FROM {_MANY} AS a(i) ASOF JOIN {_MANY} AS b(i) ON a.i >= b.i",
    "join of joins": f"SELECT count(*) FROM {', '.join(f'range(9) AS t{n}' for n in range(200))}",
    "recursion": "WITH RECURSIVE t(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM t)"
    " SELECT max(i) FROM t",
    "recursion kept": "WITH RECURSIVE t(i) AS (SELECT 1 UNION SELECT i + 1 FROM t) FROM t",
    "recursion of rows": "WITH RECURSIVE t(i) AS (SELECT 1 UNION ALL"
    " SELECT t.i + range FROM t, range(1000)) SELECT count(*) FROM t",
    "doubling": "WITH RECURSIVE t(s) AS (SELECT 'xxxxxxxxxx' UNION ALL SELECT s || s FROM t"
    " WHERE length(s) < 4000000000) SELECT max(length(s)) FROM t",
    "doubled expressions": _doubling(60),
    "sort": f"SELECT i FROM {_MANY} AS t(i) ORDER BY hash(i)",
    "sort of texts": f"SELECT s FROM (SELECT repeat(i::VARCHAR, 999) AS s FROM {_MANY} AS t(i))"
    " ORDER BY reverse(s) LIMIT 1 OFFSET 100000000",
    "window": "SELECT max(n) FROM (SELECT row_number() OVER (ORDER BY hash(i)) AS n"
    f" FROM {_MANY} AS t(i))",
    "window of lists": "SELECT max(len(l)) FROM (SELECT list(i) OVER (ORDER BY i) AS l"
    " FROM range(1000000) AS t(i))",
    "window of medians": "SELECT max(m) FROM (SELECT median(hash(i)) OVER (ORDER BY i"
    " ROWS 10000000 PRECEDING) AS m FROM range(100000000) AS t(i))",
    "distinct": f"SELECT count(DISTINCT hash(i)) FROM {_MANY} AS t(i)",
    "cube": "SELECT count(*) FROM (SELECT count(*) FROM range(10000000) AS t(i) GROUP BY CUBE ("
    + ", ".join(f"i % {n}" for n in range(2, 14)) + "))",
    "exception": f"SELECT count(*) FROM (FROM {_MANY} EXCEPT ALL SELECT range + 1 FROM {_MANY})",
    "pivot": f"PIVOT (SELECT i % 9 AS a, i FROM {_MANY} AS t(i)) ON a IN"
    f" ({', '.join(map(str, range(999)))}) USING sum(i), list(i)",
    "summary": f"SUMMARIZE SELECT a.range AS a, b.range AS b FROM {_MANY} AS a, {_MANY} AS b",
    "plan with times": f"EXPLAIN ANALYZE SELECT count(*) FROM {_MANY} AS a, {_MANY} AS b",
    "sample": f"SELECT count(*) FROM (FROM {_MANY} AS a, {_MANY} AS b USING SAMPLE 100000000 ROWS)",
}  # fmt: skip
_JSON_RUNAWAYS = {
    "nested json": "SELECT json(repeat('[', 50000000) || repeat(']', 50000000))::VARCHAR",
    "json of rows": f"SELECT json_array_length(json_group_array(i)) FROM {_MANY} AS t(i)",
    "keys of json": f"SELECT len(json_keys(json_group_object(i, i))) FROM {_MANY} AS t(i)",
    "structure of json": "SELECT json_structure('[' || string_agg('{\"a' || i || '\": 1}', ',')"
    " || ']') FROM range(3000000) AS t(i)",
}
_TEXTS_THEMSELVES = {
    "columns": f"SELECT {', '.join('1' * 1 for _ in range(20_000))}",
    "columns of rows": f"SELECT {', '.join(f'i+{n % 10}' for n in range(9_000))}"
    " FROM range(1000000) AS t(i)",
    "parentheses": f"SELECT {'(' * 30_000}1{')' * 30_000}",
    "functions": f"SELECT {'abs(' * 12_000}1{')' * 12_000}",
    "sum": f"SELECT {'1+' * 30_000}1",
    "subqueries": f"SELECT {'(SELECT ' * 6_000}1{')' * 6_000}",
    "cases": f"SELECT {'CASE WHEN true THEN ' * 2_000}1{' END' * 2_000}",
    "nots": f"SELECT {'NOT ' * 15_000}true",
    "lists": f"SELECT {'[' * 30_000}1{']' * 30_000}",
    "unions": f"SELECT count(*) FROM ({' UNION ALL '.join(['SELECT 1'] * 3_000)})",
    "a literal": f"SELECT '{'x' * 60_000}'",
    "too long": f"SELECT '{'x' * 70_000}'",
}
_RESULT_RUNAWAYS = {
    "a large row": "SELECT repeat('x', 100000000)",
    "a row of lists": "SELECT range(50000000)",
    "large rows": "SELECT repeat('x', 1000000) FROM range(1000000)",
    "many rows": "FROM range(1000000000000)",
}
RUNAWAYS = {
    **NAMED_RUNAWAYS,
    **_TEXT_RUNAWAYS,
    **{f"list {name}": text for name, text in _LIST_RUNAWAYS.items()},
    **_NUMBER_RUNAWAYS,
    **{f"relation {name}": text for name, text in _RELATION_RUNAWAYS.items()},
    **_JSON_RUNAWAYS,
    **{f"text of {name}": text for name, text in _TEXTS_THEMSELVES.items()},
    **{f"result of {name}": text for name, text in _RESULT_RUNAWAYS.items()},
}
