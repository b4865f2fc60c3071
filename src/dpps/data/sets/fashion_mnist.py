"""Fashion-MNIST, as three channels: the paper trains ResNet-18 on it."""

from dpps.data.catalog import DATA_SETS, Recipe
from dpps.data.sets.mnist import IDX, idx_sources, read_idx_files

_XIAO = (
    'H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning '
    'Algorithms", arXiv:1708.07747, 2017'
)

DATA_SETS.register("fashion-mnist")(
    Recipe(
        (IDX,),
        read_idx_files,
        _XIAO,
        idx_sources(
            (
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
                "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
            ),
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
        mean=(0.0, 0.0, 0.0),
        deviation=(1.0, 1.0, 1.0),
        examples=60_000,
        shape=(1, 28, 28),
    )
)
