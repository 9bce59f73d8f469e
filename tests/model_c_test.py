"""libweft_c from Python, with ctypes alone: a model is loaded and continues a text.

    model_c_test.py LIBRARY MODEL_DIRECTORY
"""
import ctypes as c
import os
import sys
import tempfile


class Status(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("code", c.c_int32), ("op", c.c_char * 60), ("argument", c.c_char * 64),
                ("message", c.c_char * 512)]


class Token(c.Structure):
    _fields_ = [("token", c.c_int32), ("logprob", c.c_float), ("text", c.c_char_p), ("text_bytes", c.c_size_t), ("top", c.c_void_p),
                ("top_count", c.c_size_t)]


WaitCallback = c.CFUNCTYPE(None, c.c_int64, c.c_void_p)


class LockOptions(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("has_wait", c.c_int32), ("reserved", c.c_int32), ("wait", c.c_double),
                ("on_wait", WaitCallback), ("user", c.c_void_p)]


Callback = c.CFUNCTYPE(c.c_int32, c.POINTER(Token), c.c_void_p)


def check_lock(weft, call, model, state, tokens, count, file):
    """A state file is saved and loaded through a lock, and a second lock is refused after the callback."""
    lock, second, seen, held = c.c_void_p(), c.c_void_p(), c.c_size_t(), []
    on_wait = WaitCallback(lambda process, _: held.append(process))
    call("weft_state_lock_open", file.encode(), None, c.byref(lock))
    assert weft.weft_state_lock_exists(lock) == 0
    call("weft_state_lock_save", model, lock, state, c.c_int64(0), tokens, count)
    assert weft.weft_state_lock_exists(lock) == 1
    for wait in 0, 1.2:
        options = LockOptions(struct_size=c.sizeof(LockOptions), has_wait=1, wait=wait, on_wait=on_wait)
        try:
            call("weft_state_lock_open", file.encode(), c.byref(options), c.byref(second))
            raise AssertionError("two locks of one file")
        except RuntimeError as error:
            assert f"held by process {os.getpid()}" in str(error), error
        assert held == ([os.getpid()] if wait else []), held
    call("weft_state_lock_load", model, lock, state, c.c_int64(0), tokens, c.c_size_t(len(tokens)), c.byref(seen))
    assert seen.value == count.value, seen.value
    weft.weft_state_lock_close(lock)
    assert os.listdir(os.path.dirname(file)) == ["story.state"]


def main(library, directory):
    weft = c.CDLL(library)
    status = Status(struct_size=c.sizeof(Status))

    def call(name, *arguments):
        if getattr(weft, name)(*arguments, c.byref(status)):
            raise RuntimeError(status.message.decode())

    model, state, count = c.c_void_p(), c.c_void_p(), c.c_size_t()
    call("weft_model_load", directory.encode(), None, c.byref(model))
    call("weft_state_create", model, None, None, c.byref(state))
    prompt = "The old house".encode()
    tokens = (c.c_int32 * 4096)()
    call("weft_model_encode", model, c.c_char_p(prompt), c.c_size_t(len(prompt)), tokens, c.c_size_t(len(tokens)), c.byref(count))
    prompt_tokens = count.value
    pieces = []

    def on_token(token, _):
        pieces.append(token.contents.text.decode())
        return 1 if len(pieces) == 12 else 0

    call("weft_generate", model, None, state, None, tokens, c.c_size_t(len(tokens)), c.byref(count), Callback(on_token), None, None)
    text = "".join(pieces)
    print(prompt.decode() + text)
    assert count.value == prompt_tokens + 12, count.value
    buffer, size = c.create_string_buffer(4096), c.c_size_t()
    call("weft_model_decode", model, tokens, count, buffer, c.c_size_t(len(buffer)), c.byref(size))
    assert buffer.value.decode() == prompt.decode() + text, buffer.value
    with tempfile.TemporaryDirectory() as folder:
        check_lock(weft, call, model, state, tokens, count, os.path.join(folder, "story.state"))
    try:
        call("weft_state_fork", state, c.c_int64(0), c.c_int64(9))
        raise AssertionError("a sequence that does not exist was accepted")
    except RuntimeError as error:
        assert "9" in str(error), error
    weft.weft_state_free(state)
    weft.weft_model_free(model)


if __name__ == "__main__":
    main(*sys.argv[1:])
