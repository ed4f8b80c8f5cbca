import pytest

from relay.fleet.selection import Selection
from relay.mcp_api.url_options import MAX_VALUES, UrlOptionError, UrlOptionReader, UrlOptions
from schemas.addresses import View
from schemas.kinds import KindRegistry

PARAMETERS = "the URL's parameters are names, view, nodes, kinds, tags"
KINDS = "kinds must be system.echo (sysecho), system.metrics (sys)"


@pytest.fixture(scope="module")
def reader() -> UrlOptionReader:
    return UrlOptionReader(KindRegistry())


@pytest.mark.parametrize(
    ("query", "selection"),
    [
        pytest.param("", Selection(), id="nothing"),
        pytest.param("view=tools", Selection(), id="the default"),
        pytest.param("view=kinds", Selection(View.KINDS), id="kinds"),
        pytest.param("&&view=kinds&", Selection(View.KINDS), id="empty parameters"),
        pytest.param("nodes=greenhouse+pi", Selection(nodes=("greenhouse pi",)), id="a label"),
        pytest.param("nodes=a,b&nodes=c", Selection(nodes=("a", "b", "c")), id="several"),
        pytest.param("nodes=a%2Cb", Selection(nodes=("a,b",)), id="a label with a comma"),
        pytest.param("%6eodes=a", Selection(nodes=("a",)), id="an escaped name"),
        pytest.param("kinds=sys", Selection(kinds=frozenset({"sys"})), id="a short kind"),
        pytest.param(
            "kinds=system.metrics,sysecho", Selection(kinds=frozenset({"sys", "sysecho"})), id="two kinds"
        ),
        pytest.param(
            "tags=site%3Dnorth,tag:gateway,site=south",
            Selection(tags=("site=north", "gateway", "site=south")),
            id="tags",
        ),
    ],
)
def test_a_query_selects_what_it_says(reader: UrlOptionReader, query: str, selection: Selection) -> None:
    assert reader.read(query) == UrlOptions(dashed=False, selection=selection)
    assert reader.read(f"{query}&names=dashed") == UrlOptions(dashed=True, selection=selection)


@pytest.mark.parametrize(("path", "view"), [("/mcp/tools", View.TOOLS), ("/mcp/kinds", View.KINDS)])
def test_a_path_chooses_a_view_and_dashed_names_and_a_query_may_narrow_it(path: str, view: View) -> None:
    for default in View:
        reader = UrlOptionReader(KindRegistry(), default)
        assert reader.read("", path) == UrlOptions(dashed=True, selection=Selection(view))
        assert reader.read("tags=a", path).selection == Selection(view, tags=("a",))


@pytest.mark.parametrize("query", ["view=tools", "view=kinds", "names=dashed", "names=dotted"])
def test_what_the_path_has_chosen_the_query_may_not(reader: UrlOptionReader, query: str) -> None:
    with pytest.raises(UrlOptionError, match="be given once, by path or query"):
        reader.read(query, "/mcp/kinds")


def test_the_view_of_a_query_without_one_can_be_changed() -> None:
    reader = UrlOptionReader(KindRegistry())
    assert reader.read("").selection.view is View.TOOLS
    reader.change_default(View.KINDS)
    assert [reader.read(query).selection.view for query in ("", "view=tools")] == [View.KINDS, View.TOOLS]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("names=", "names must be dotted or dashed, and be given once, by path or query"),
        ("names=DASHED", "names must be dotted or dashed, and be given once, by path or query"),
        ("view=", "view must be tools or kinds, and be given once, by path or query"),
        ("view=nodes", "view must be tools or kinds, and be given once, by path or query"),
        ("view=kinds&view=kinds", "view must be tools or kinds, and be given once, by path or query"),
        ("veiw=kinds", f"{PARAMETERS}; did you mean view?"),
        ("node=a", f"{PARAMETERS}; did you mean nodes?"),
        ("View=kinds", f"{PARAMETERS}; did you mean view?"),
        ("utm_source=x", PARAMETERS),
        ("kinds=system.camera", KINDS),
        ("kinds=", f"{KINDS.replace('must be', 'must be')}; 1 to {MAX_VALUES} of them, not empty"),
        ("nodes=", f"nodes must be labels or ids of nodes; 1 to {MAX_VALUES} of them, not empty"),
        ("nodes=a,", f"nodes must be labels or ids of nodes; 1 to {MAX_VALUES} of them, not empty"),
        ("nodes=" + "x" * 65, f"nodes must be labels or ids of nodes; 1 to {MAX_VALUES} of them, not empty"),
        ("tags=", f"tags must be such as site=north or gateway; 1 to {MAX_VALUES} of them, not empty"),
        ("tags=Site", "tags must be such as site=north or gateway"),
        ("tags=a=b=c", "tags must be such as site=north or gateway"),
        ("tags=*", "tags must be such as site=north or gateway"),
    ],
)
def test_what_is_not_allowed_is_an_error_that_names_what_is(
    reader: UrlOptionReader, query: str, message: str
) -> None:
    with pytest.raises(UrlOptionError) as caught:
        reader.read(query)
    assert str(caught.value) == message


def test_the_number_of_values_is_bounded(reader: UrlOptionReader) -> None:
    most = [f"a{number}" for number in range(MAX_VALUES)]
    assert reader.read("nodes=" + ",".join(most)).selection.nodes == tuple(most)
    assert reader.read("nodes=a,b,a&tags=x,x").selection == Selection(nodes=("a", "b"), tags=("x",))
    with pytest.raises(UrlOptionError):
        reader.read("nodes=" + ",".join(["a"] * MAX_VALUES) + "&nodes=a")
