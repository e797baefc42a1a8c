import pytest

from shoal.pool import Api
from shoal.wire import api_of


@pytest.mark.parametrize(
    ("path", "api"),
    [
        ("/v1/chat/completions", Api.CHAT),
        ("/v1/completions", Api.COMPLETIONS),
        ("/v1/responses", Api.RESPONSES),
        ("/v1/messages", Api.MESSAGES),
        ("/v1/messages/count_tokens", Api.MESSAGES),
        ("/v1/embeddings", Api.EMBEDDINGS),
        ("/tokenize", Api.TOKENIZE),
        ("/inference/v1/generate", Api.GENERATE),
        ("/v1/rerank", Api.RERANK),
        ("/rerank", Api.RERANK),
        ("/v2/rerank", Api.RERANK),
        ("/score", Api.SCORE),
        ("/v1/score", Api.SCORE),
        ("/pooling", Api.POOLING),
        ("/v1/audio/transcriptions", Api.AUDIO),
        ("/v1/audio/anything-new", Api.AUDIO),
        ("/openai/v1/chat/completions", Api.CHAT),
        ("/openai/deployments/x/chat/completions?api-version=2024", Api.CHAT),
        ("/v1/chat/completions/", Api.CHAT),
        ("/v1/chat/completions#top", Api.CHAT),
        ("/v1/models", Api.OTHER),
        ("/v1/responses/resp_1/cancel", Api.OTHER),
        ("/threads/1/messages", Api.OTHER),
        ("/x?next=/v1/chat/completions", Api.OTHER),
        ("", Api.OTHER),
        ("*", Api.OTHER),
    ],
)
def test_the_longest_ending_of_a_path_names_its_api(path: str, api: Api) -> None:
    assert api_of(path) is api
