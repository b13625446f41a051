"""A page of metrics in Prometheus' text format, as far as it is needed: the values of one metric."""


def values(page: str, metric: str) -> list[float]:
    """Return a metric's values, one per set of labels; none where the page does not have it, or is not such a page.

    Example: of `a:use{engine="0"} 0.5` and `a:use{engine="1"} 0.7`, the metric `a:use` has 0.5 and 0.7.
    """
    found: list[float] = []
    for line in page.splitlines():
        name, _, value = line.rpartition(" ")
        if name.partition("{")[0] == metric:
            try:
                found.append(float(value))
            except ValueError:
                return []
    return found
