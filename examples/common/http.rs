//! A minimal HTTP/1 server and client. It has nothing to do with locks: use your own HTTP library.

use std::{
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    thread,
    time::Duration,
};

use super::{Result, nanos, now, sleep};

const THREADS: usize = 16;
const HEAD_SIZE_MAX: usize = 8 * 1024;
const BODY_SIZE_MAX: usize = 64 * 1024;
/// Maximum time for a whole request, however slowly its parts arrive.
const READ_TIMEOUT: Duration = Duration::from_secs(5);

pub(crate) struct Request {
    pub(crate) method: String,
    pub(crate) path: String,
}

pub(crate) struct Response {
    status: u16,
    reason: &'static str,
    header: &'static str,
    body: String,
}

impl Response {
    pub(crate) fn new(status: u16, reason: &'static str, body: impl ToString) -> Response {
        Response { status, reason, header: "", body: body.to_string() }
    }

    pub(crate) fn ok(body: String) -> Response {
        Response::new(200, "OK", body)
    }

    pub(crate) fn header(self, header: &'static str) -> Response {
        Response { header, ..self }
    }

    fn send(&self, mut stream: &TcpStream) -> io::Result<()> {
        stream.set_write_timeout(Some(READ_TIMEOUT))?;
        let mut head = format!("HTTP/1.1 {} {}\r\n", self.status, self.reason);
        if !self.header.is_empty() {
            head.push_str(&format!("{}\r\n", self.header));
        }
        let length = self.body.len() + 1;
        head.push_str("Content-Type: text/plain; charset=utf-8\r\n");
        head.push_str(&format!("Content-Length: {length}\r\nConnection: close\r\n\r\n"));
        stream.write_all(format!("{head}{}\n", self.body).as_bytes())?;
        stream.shutdown(Shutdown::Write)?;
        // Closing a socket with unread input resets the connection, and the client may lose the
        // response.
        let deadline = now() + nanos(Duration::from_secs(1));
        let mut rest = Vec::new();
        while rest.len() < BODY_SIZE_MAX && read_some(stream, &mut rest, deadline).is_ok() {}
        Ok(())
    }
}

/// Handles requests forever, in several threads.
pub(crate) fn serve(listener: &TcpListener, handle: impl Fn(&Request) -> Response + Sync) {
    thread::scope(|threads| {
        for _ in 0..THREADS {
            threads.spawn(|| {
                loop {
                    match listener.accept() {
                        Ok((stream, _)) => respond(&stream, &handle),
                        // A temporary error, for example too many open files.
                        Err(_) => sleep(Duration::from_millis(50)),
                    }
                }
            });
        }
    });
}

fn respond(stream: &TcpStream, handle: impl Fn(&Request) -> Response) {
    let response = match read_request(stream) {
        Ok(request) => handle(&request),
        Err(refusal) => refusal,
    };
    // The client may have closed the connection.
    let _ = response.send(stream);
}

/// Reads a request. The error is the response to an invalid one.
fn read_request(stream: &TcpStream) -> std::result::Result<Request, Response> {
    let bad = |reason: &str| Response::new(400, "Bad Request", reason);
    let deadline = now() + nanos(READ_TIMEOUT);
    let mut bytes = Vec::new();
    let head_size = loop {
        if let Some(at) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            break at + 4;
        }
        if bytes.len() > HEAD_SIZE_MAX {
            return Err(Response::new(
                431,
                "Request Header Fields Too Large",
                "the head is too large",
            ));
        }
        read_some(stream, &mut bytes, deadline)?;
    };
    let head =
        std::str::from_utf8(&bytes[..head_size]).map_err(|_| bad("the head is not UTF-8"))?;
    let mut lines = head.split("\r\n");
    let first: Vec<&str> = lines.next().unwrap_or_default().split(' ').collect();
    let [method, path, "HTTP/1.1" | "HTTP/1.0"] = first[..] else {
        return Err(bad("this is not HTTP/1"));
    };
    let request = Request { method: method.to_owned(), path: path.to_owned() };
    let mut body_size = 0;
    for (name, value) in lines.filter_map(|line| line.split_once(':')) {
        if name.eq_ignore_ascii_case("content-length") {
            body_size =
                value.trim().parse().map_err(|_| bad("the content length is not a number"))?;
        } else if name.eq_ignore_ascii_case("transfer-encoding") {
            return Err(Response::new(411, "Length Required", "send a content length"));
        }
    }
    if body_size > BODY_SIZE_MAX {
        let limit = format!("a body may have {BODY_SIZE_MAX} bytes");
        return Err(Response::new(413, "Content Too Large", limit));
    }
    // The body is ignored, but must be read: see `Response::send`.
    while bytes.len() < head_size + body_size {
        read_some(stream, &mut bytes, deadline)?;
    }
    Ok(request)
}

fn read_some(
    mut stream: &TcpStream,
    bytes: &mut Vec<u8>,
    deadline: u64,
) -> std::result::Result<(), Response> {
    let timeout = || Response::new(408, "Request Timeout", "the request took too long");
    let left = Duration::from_nanos(deadline.saturating_sub(now()));
    if left.is_zero() || stream.set_read_timeout(Some(left)).is_err() {
        return Err(timeout());
    }
    let mut chunk = [0; 1024];
    match stream.read(&mut chunk) {
        Ok(0) => Err(Response::new(400, "Bad Request", "the request is incomplete")),
        Ok(read) => {
            bytes.extend_from_slice(&chunk[..read]);
            Ok(())
        }
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
        Err(_) => Err(timeout()),
    }
}

/// Sends a request and returns the status and the body of the response.
pub(crate) fn send(addr: SocketAddr, method: &str, path: &str) -> Result<(u16, String)> {
    let mut stream = TcpStream::connect(addr)?;
    stream.set_read_timeout(Some(Duration::from_secs(20)))?;
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: {addr}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    );
    stream.write_all(head.as_bytes())?;
    let mut response = String::new();
    stream.read_to_string(&mut response)?;
    let (head, body) = response.split_once("\r\n\r\n").ok_or("the response has no end")?;
    let status = head.split(' ').nth(1).ok_or("the response has no status")?;
    Ok((status.parse()?, body.to_owned()))
}

/// A path that is too long for the server.
pub(crate) fn oversized_path() -> String {
    format!("/{}", "x".repeat(2 * HEAD_SIZE_MAX))
}
