"""A picker worker that only keeps what it is told: the admin API of a real one, over plain `http.server`.

`python fake_worker.py --socket S --admin A --picker-id N [--crash-before-ready]`.  GET /told answers the types of the
events it was sent, GET /shared what it was told of its siblings; POST /drain ends it, and with `leaves=1` it leaves the
explanation of one request, `known-to-INCARNATION`.
"""

import argparse
import json
import os
import signal
import socket
import socketserver
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import msgspec

from shoal.hosts.bequest import path_of, write

told: list[dict[str, object]] = []
shared: list[dict[str, object]] = []
inflight = {"count": 0}
began = {"draining": False}


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    picker = "0"
    admin = Path()

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def answer(self, body: object, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path == "/snapshot":
            known = [str(event["endpoint"]["id"]) for event in told if event["type"] == "joined"]  # type: ignore[index]
            self.answer(
                {
                    "picker": self.picker,
                    "pid": os.getpid(),
                    "uptime_s": 1.0,
                    "endpoints": [
                        {"id": name, "state": "ready", "inflight_requests": inflight["count"]}
                        for name in dict.fromkeys(known)
                    ],
                    "requests_total": 10,
                    "inflight": inflight["count"],
                    "errors_total": 1,
                    "warnings": [],
                }
            )
        elif self.path.startswith("/metrics"):
            samples = [["_total", {}, 10.0]]
            self.answer([{"name": "shoal_requests", "help": "", "type": "counter", "merge": "sum", "samples": samples}])
        elif self.path.startswith("/explain/mine-"):
            self.answer({"request_id": self.path.rsplit("-", 1)[1]}, 200 if self.path.endswith(self.picker) else 404)
        elif self.path == "/told":
            self.answer(told)
        elif self.path == "/shared":
            self.answer(shared)
        elif self.path == "/healthz":
            self.answer("ok")
        else:
            self.answer({"error": "unknown"}, 404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/events":
            told.extend(msgspec.msgpack.decode(body))
            self.answer("taken")
        elif self.path == "/peers":
            shared.append({"peers": json.loads(body)})
            self.answer("told")
        elif self.path == "/begin":
            shared.append({"begin": json.loads(body)})
            self.answer("begun")
        elif self.path.startswith("/drain"):
            began["draining"] = True
            if "leaves=1" in self.path:
                write(path_of(self.admin), [{"request_id": f"known-to-{self.admin.stem[1:]}"}])
            self.answer("draining")
            threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        elif self.path.startswith("/inflight/"):
            inflight["count"] = int(self.path.rsplit("/", 1)[1])
            self.answer("set")
        else:
            self.answer({"error": "unknown"}, 404)


def main(argv: list[str] | None = None) -> int:
    flags = argparse.ArgumentParser()
    for name in ("--socket", "--admin", "--picker-id"):
        flags.add_argument(name)
    flags.add_argument("--crash-before-ready", action="store_true")
    args, _ = flags.parse_known_args(argv)
    if args.crash_before_ready:
        sys.exit("cannot load")
    Handler.picker = args.picker_id
    Handler.admin = Path(args.admin)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    service = socket.socket(socket.AF_UNIX)
    service.bind(args.socket)
    service.listen()

    def serve_grpc() -> None:  # says which process answers
        while True:
            connection, _ = service.accept()
            connection.sendall(f"{os.getpid()}\n".encode())
            connection.close()

    threading.Thread(target=serve_grpc, daemon=True).start()
    with Server(args.admin, Handler) as server:
        server.serve_forever(poll_interval=0.05)
    return 0


if __name__ == "__main__":
    main()
