"""The tests: a real server in its own process, a scripted or tiny random model, a strict client over a real socket.

def test_echo(serve, tiny):
    server = serve(tiny("scripted"))  # a server and a model made once a session
    assert chat(server, "Say this.").content == "Say this."  # from tests.client; the scripted model replies its prompt

`tiny_models.py` says which models there are, `scripted_model.py` what a script can hold, `conftest.py` how servers are
shared, `client.py` what a Reply has. `serve(model, module="mlx_lm.server")` is the same on upstream alone.
"""
