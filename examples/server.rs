//! A blocking HTTP backend whose handlers take a lock per order, so that no order is handled twice at once, by
//! however many backends.
//!
//! ```text
//! cargo run --example server                       # then: curl -X POST http://127.0.0.1:8080/orders/42/pay
//! cargo run --example server -- --listen 0.0.0.0:80
//! cargo run --example server -- --self-test        # two backends, many requests at once
//! ```
//!
//! A request that finds its order locked is answered with 409 and the holder, one that cannot find out with 503.

#[path = "common/mod.rs"]
mod common;

use std::{
    collections::BTreeMap,
    env,
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    process::ExitCode,
    sync::Arc,
    thread,
    time::Duration,
};

use common::{Outcome, Server, Watchdog, conclude, ensure, nanos, now, work_for};
use distlock::{Config, FencingToken, RedisMgr};
use parking_lot::Mutex;

const HANDLERS: usize = 16;
const HEAD_LIMIT: usize = 8 * 1024;
const BODY_LIMIT: usize = 64 * 1024;
/// For a whole request, however slowly its parts arrive.
const READ_LIMIT: Duration = Duration::from_secs(5);
const TIME_OF_A_PAYMENT: Duration = Duration::from_millis(300);

fn main() -> ExitCode {
    let words: Vec<String> = env::args().skip(1).collect();
    conclude(match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => serve("127.0.0.1:8080"),
        ["--listen", addr] => serve(addr),
        ["--self-test"] => self_test(),
        _ => Err("the options are --listen ADDRESS:PORT and --self-test".into()),
    })
}

fn serve(addr: &str) -> Outcome {
    let watchdog = Watchdog::start()?;
    let server = Server::find(&watchdog)?;
    let backend = Backend::new(server.config(), Arc::default())?;
    let listener = TcpListener::bind(addr).map_err(|error| format!("cannot listen on {addr}: {error}"))?;
    let addr = listener.local_addr()?;
    println!("The server of the locks is {}.", server.introduction());
    println!("Listening on http://{addr}\n\nA payment takes {TIME_OF_A_PAYMENT:?}. Two for one order at once:\n");
    println!("    curl -X POST http://{addr}/orders/42/pay & curl -X POST http://{addr}/orders/42/pay\n");
    backend.listen(listener)
}

/// What a database would keep.
#[derive(Default)]
struct Orders {
    orders: Mutex<BTreeMap<u64, Order>>,
}

#[derive(Default)]
struct Order {
    paid_under: Option<FencingToken>,
    payments: u32,
    handled_now: u32,
    handled_at_once: u32,
}

impl Orders {
    fn with<T>(&self, number: u64, act: impl FnOnce(&mut Order) -> T) -> T {
        act(self.orders.lock().entry(number).or_default())
    }
}

#[derive(Clone)]
struct Backend {
    mgr: RedisMgr,
    orders: Arc<Orders>,
}

impl Backend {
    fn new(config: Config, orders: Arc<Orders>) -> Outcome<Backend> {
        Ok(Backend { mgr: RedisMgr::new(config.prefix("distlock-example:"))?, orders })
    }

    /// Handles requests, as many at once as there are threads.
    fn listen(&self, listener: TcpListener) -> Outcome {
        thread::scope(|threads| {
            for _ in 0..HANDLERS {
                threads.spawn(|| {
                    loop {
                        match listener.accept() {
                            Ok((stream, _)) => self.converse(&stream),
                            // Too many open files, for example; it may pass.
                            Err(_) => work_for(Duration::from_millis(50)),
                        }
                    }
                });
            }
        });
        Ok(())
    }

    /// One request, one answer. A client that goes away in between is its own problem.
    fn converse(&self, stream: &TcpStream) {
        let reply = match read_request(stream) {
            Ok(request) => self.handle(&request),
            Err(refusal) => refusal,
        };
        let _ = reply.send(stream);
    }

    fn handle(&self, request: &Request) -> Reply {
        let parts: Vec<&str> = request.path.split('/').skip(1).collect();
        match (&*request.method, &parts[..]) {
            (method, ["orders", number, rest @ ..]) => match (method, number.parse(), rest) {
                ("GET", Ok(number), []) => self.show(number),
                ("POST", Ok(number), ["pay"]) => self.pay(number),
                (_, Ok(_), [] | ["pay"]) => Reply::new(405, "Method Not Allowed", "GET an order, POST a payment"),
                _ => Reply::new(404, "Not Found", "an order is a number; it can be paid"),
            },
            _ => Reply::new(404, "Not Found", "try POST /orders/42/pay"),
        }
    }

    fn show(&self, number: u64) -> Reply {
        let paid = self.orders.with(number, |order| order.paid_under);
        let paid = paid.map_or("is not paid".into(), |token| format!("was paid under token {token}"));
        match self.mgr.holder(&lock_name(number)) {
            Ok(Some(holder)) => Reply::ok(format!("order {number} {paid}; it is being handled by {holder}")),
            Ok(None) => Reply::ok(format!("order {number} {paid}; nobody is handling it")),
            Err(error) => Reply::unavailable(error),
        }
    }

    fn pay(&self, number: u64) -> Reply {
        let guard = match self.mgr.try_lock(&lock_name(number)) {
            Ok(guard) => guard,
            Err(error) if error.is_contended() => {
                return Reply::new(409, "Conflict", error).header("Retry-After: 1");
            }
            Err(error) if error.is_unavailable() => return Reply::unavailable(error),
            Err(error) => return Reply::new(500, "Internal Server Error", error),
        };
        if let Some(token) = self.orders.with(number, |order| order.paid_under) {
            return Reply::ok(format!("order {number} was already paid, under token {token}"));
        }
        self.orders.with(number, |order| {
            order.handled_now += 1;
            order.handled_at_once = order.handled_at_once.max(order.handled_now);
        });
        work_for(TIME_OF_A_PAYMENT);
        self.orders.with(number, |order| order.handled_now -= 1);
        // The last moment to notice that the lock is lost. A database would check the token, see `fenced_write`.
        if let Err(error) = guard.ensure_held() {
            return Reply::unavailable(error);
        }
        self.orders.with(number, |order| {
            order.payments += 1;
            order.paid_under = Some(guard.fencing_token());
        });
        Reply::ok(format!("order {number} is paid, under token {}", guard.fencing_token()))
    }
}

fn lock_name(number: u64) -> String {
    format!("order:{number}")
}

struct Request {
    method: String,
    path: String,
}

/// Reads a request, and no more of it than the limits allow.
fn read_request(stream: &TcpStream) -> Result<Request, Reply> {
    let bad = |why: &str| Reply::new(400, "Bad Request", why);
    let deadline = now() + nanos(READ_LIMIT);
    let mut bytes = Vec::new();
    let head_end = loop {
        if let Some(at) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            break at + 4;
        }
        if bytes.len() > HEAD_LIMIT {
            return Err(Reply::new(431, "Request Header Fields Too Large", "that is too much"));
        }
        read_some(stream, &mut bytes, deadline)?;
    };
    let head = std::str::from_utf8(&bytes[..head_end]).map_err(|_| bad("the head is not text"))?;
    let mut lines = head.split("\r\n");
    let first: Vec<&str> = lines.next().unwrap_or_default().split(' ').collect();
    let [method, path, "HTTP/1.1" | "HTTP/1.0"] = first[..] else { return Err(bad("this is not HTTP/1")) };
    let request = Request { method: method.to_owned(), path: path.to_owned() };
    let mut body_length = 0;
    for (name, value) in lines.filter_map(|line| line.split_once(':')) {
        if name.eq_ignore_ascii_case("content-length") {
            body_length = value.trim().parse().map_err(|_| bad("the content length is not a number"))?;
        } else if name.eq_ignore_ascii_case("transfer-encoding") {
            return Err(Reply::new(411, "Length Required", "send a content length"));
        }
    }
    if body_length > BODY_LIMIT {
        return Err(Reply::new(413, "Content Too Large", format!("a body may have {BODY_LIMIT} bytes")));
    }
    // Nothing is done with a body, but a connection that is closed before all was read breaks the reply.
    while bytes.len() < head_end + body_length {
        read_some(stream, &mut bytes, deadline)?;
    }
    Ok(request)
}

fn read_some(mut stream: &TcpStream, bytes: &mut Vec<u8>, deadline: u64) -> Result<(), Reply> {
    let timeout = || Reply::new(408, "Request Timeout", "that took too long");
    let left = Duration::from_nanos(deadline.saturating_sub(now()));
    if left.is_zero() || stream.set_read_timeout(Some(left)).is_err() {
        return Err(timeout());
    }
    let mut chunk = [0; 1024];
    match stream.read(&mut chunk) {
        Ok(0) => Err(Reply::new(400, "Bad Request", "the request is not complete")),
        Ok(read) => {
            bytes.extend_from_slice(&chunk[..read]);
            Ok(())
        }
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
        Err(_) => Err(timeout()),
    }
}

struct Reply {
    status: u16,
    reason: &'static str,
    header: &'static str,
    body: String,
}

impl Reply {
    fn new(status: u16, reason: &'static str, body: impl ToString) -> Reply {
        Reply { status, reason, header: "", body: body.to_string() }
    }

    fn ok(body: String) -> Reply {
        Reply::new(200, "OK", body)
    }

    fn unavailable(error: impl ToString) -> Reply {
        Reply::new(503, "Service Unavailable", error).header("Retry-After: 5")
    }

    fn header(self, header: &'static str) -> Reply {
        Reply { header, ..self }
    }

    fn send(&self, mut stream: &TcpStream) -> io::Result<()> {
        stream.set_write_timeout(Some(READ_LIMIT))?;
        let mut head = format!("HTTP/1.1 {} {}\r\n", self.status, self.reason);
        if !self.header.is_empty() {
            head.push_str(&format!("{}\r\n", self.header));
        }
        let length = self.body.len() + 1;
        head.push_str(&format!(
            "Content-Type: text/plain; charset=utf-8\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
        ));
        stream.write_all(format!("{head}{}\n", self.body).as_bytes())?;
        stream.shutdown(Shutdown::Write)?;
        // To close a connection with something unread is to cut it, and the reply may be lost.
        let deadline = now() + nanos(Duration::from_secs(1));
        let mut rest = Vec::new();
        while rest.len() < BODY_LIMIT && read_some(stream, &mut rest, deadline).is_ok() {}
        Ok(())
    }
}

/// Fires requests at two backends, as a load balancer would, and looks whether an order was ever handled twice at once.
fn self_test() -> Outcome {
    const ORDERS: u64 = 4;
    const REQUESTS_PER_ORDER: usize = 6;
    let watchdog = Watchdog::start()?;
    let server = Server::find(&watchdog)?;
    println!("The server of the locks is {}.", server.introduction());
    let orders: Arc<Orders> = Arc::default();
    let addrs = [start(server.config(), &orders)?, start(server.config(), &orders)?];
    println!(
        "{} requests at once, to two backends: {REQUESTS_PER_ORDER} for each of {ORDERS} orders.\n",
        ORDERS as usize * REQUESTS_PER_ORDER
    );

    let answers = thread::scope(|threads| {
        let requests: Vec<_> = (0..REQUESTS_PER_ORDER)
            .flat_map(|index| (1..=ORDERS).map(move |number| (addrs[index % addrs.len()], number)))
            .map(|(addr, number)| threads.spawn(move || (number, ask(addr, "POST", &format!("/orders/{number}/pay")))))
            .collect();
        requests
            .into_iter()
            .map(|request| request.join().map_err(|_| "a request panicked"))
            .collect::<Result<Vec<_>, _>>()
    })?;
    let mut refusal = None;
    for number in 1..=ORDERS {
        let (mut paid, mut conflicts, mut later) = (0, 0, 0);
        for (_, answer) in answers.iter().filter(|(asked, _)| *asked == number) {
            match answer.as_ref().map_err(ToString::to_string)? {
                (200, body) if body.contains("is paid") => paid += 1,
                (200, _) => later += 1,
                (409, body) => {
                    conflicts += 1;
                    refusal = Some(body);
                }
                (status, body) => return Err(format!("an unexpected answer, {status}: {body}").into()),
            }
        }
        let (payments, at_once) = orders.with(number, |order| (order.payments, order.handled_at_once));
        println!(
            "order {number}: handled by at most {at_once} at once; 200 paid: {paid}, 200 already paid: {later}, \
             409: {conflicts}"
        );
        ensure(at_once == 1, "no order is handled twice at once")?;
        ensure((payments, paid) == (1, 1), "each order is paid once")?;
    }
    let refusal = refusal.ok_or("no two requests for one order met, so nothing was shown")?;
    println!("\n409 says: {}", refusal.trim());

    let nobody = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let cut_off = start(Config::new(format!("redis://{nobody}")), &orders)?;
    for (addr, method, path, expected) in [
        (cut_off, "POST", "/orders/7/pay", 503),
        (addrs[0], "GET", "/orders/1", 200),
        (addrs[0], "GET", "/orders/1/pay", 405),
        (addrs[0], "POST", "/orders/none/pay", 404),
        (addrs[0], "POST", &*format!("/{}", "x".repeat(2 * HEAD_LIMIT)), 431),
    ] {
        let (status, body) = ask(addr, method, path)?;
        println!("{status} says: {}", body.trim());
        ensure(status == expected, &format!("{method} {path:.20} is answered with {expected}"))?;
    }
    Ok(())
}

/// Starts a backend that lives as long as the process.
fn start(config: Config, orders: &Arc<Orders>) -> Outcome<SocketAddr> {
    let backend = Backend::new(config, orders.clone())?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let addr = listener.local_addr()?;
    thread::spawn(move || backend.listen(listener).is_ok());
    Ok(addr)
}

fn ask(addr: SocketAddr, method: &str, path: &str) -> Outcome<(u16, String)> {
    let mut stream = TcpStream::connect(addr)?;
    stream.set_read_timeout(Some(Duration::from_secs(20)))?;
    stream.write_all(format!("{method} {path} HTTP/1.1\r\nHost: {addr}\r\nContent-Length: 0\r\n\r\n").as_bytes())?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply)?;
    let (head, body) = reply.split_once("\r\n\r\n").ok_or("the reply has no end")?;
    let status = head.split(' ').nth(1).ok_or("the reply has no status")?;
    Ok((status.parse()?, body.to_owned()))
}
