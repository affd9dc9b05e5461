//! A blocking HTTP backend that acquires a lock for each order it handles. However many backends
//! run, no order is handled by two of them at once.
//!
//! ```text
//! cargo run --example server        # then: curl -X POST http://127.0.0.1:8080/orders/42/pay
//! cargo run --example server -- --listen 0.0.0.0:80
//! cargo run --example server -- --self-test          # two backends, many requests at once
//! ```
//!
//! If the order is locked, the response is 409 and names the holder. If the lock server is
//! unreachable, the response is 503.

#[path = "common/mod.rs"]
mod common;

use std::{
    collections::BTreeMap,
    env,
    net::{SocketAddr, TcpListener},
    process::ExitCode,
    sync::Arc,
    thread,
    time::Duration,
};

use common::{
    Cleanup, Result, Server, ensure, exit_code,
    http::{self, Request, Response},
    sleep,
};
use distlock::{Config, FencingToken, RedisMgr};
use parking_lot::Mutex;

const PAYMENT_DURATION: Duration = Duration::from_millis(300);

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    exit_code(match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => listen("127.0.0.1:8080"),
        ["--listen", addr] => listen(addr),
        ["--self-test"] => self_test(),
        _ => Err("usage: server [--listen ADDRESS:PORT | --self-test]".into()),
    })
}

/// One instance of the backend. A single manager serves all its threads.
struct Backend {
    mgr: RedisMgr,
    orders: Arc<Orders>,
}

impl Backend {
    fn new(config: Config, orders: Arc<Orders>) -> Result<Backend> {
        Ok(Backend { mgr: RedisMgr::new(config.prefix("distlock-example:"))?, orders })
    }

    fn pay(&self, number: u64) -> Response {
        // Does not wait: the client is asked to retry instead.
        let guard = match self.mgr.try_lock(&lock_name(number)) {
            Ok(guard) => guard,
            Err(error) if error.is_contended() => {
                return Response::new(409, "Conflict", error).header("Retry-After: 1");
            }
            Err(error) if error.is_unavailable() => return unavailable(error),
            Err(error) => return Response::new(500, "Internal Server Error", error),
        };
        if let Some(token) = self.orders.with(number, |order| order.paid_under) {
            return Response::ok(format!("order {number} was already paid, under token {token}"));
        }
        self.orders.with(number, Order::begin_payment);
        sleep(PAYMENT_DURATION);
        self.orders.with(number, Order::end_payment);
        // The last check before the effect. A database should also check the token: see
        // `fenced_write`.
        if let Err(error) = guard.ensure_held() {
            return unavailable(error);
        }
        let token = guard.fencing_token();
        self.orders.with(number, |order| {
            order.payments += 1;
            order.paid_under = Some(token);
        });
        Response::ok(format!("order {number} is paid, under token {token}"))
        // Dropping the guard releases the lock.
    }

    fn show(&self, number: u64) -> Response {
        let paid = match self.orders.with(number, |order| order.paid_under) {
            Some(token) => format!("was paid under token {token}"),
            None => "is not paid".into(),
        };
        match self.mgr.holder(&lock_name(number)) {
            Ok(Some(holder)) => {
                Response::ok(format!("order {number} {paid}; it is being handled by {holder}"))
            }
            Ok(None) => Response::ok(format!("order {number} {paid}; it is not being handled")),
            Err(error) => unavailable(error),
        }
    }

    fn handle(&self, request: &Request) -> Response {
        let parts: Vec<&str> = request.path.split('/').skip(1).collect();
        let ["orders", number, rest @ ..] = &parts[..] else {
            return Response::new(404, "Not Found", "try POST /orders/42/pay");
        };
        match (&*request.method, number.parse(), rest) {
            ("GET", Ok(number), []) => self.show(number),
            ("POST", Ok(number), ["pay"]) => self.pay(number),
            (_, Ok(_), [] | ["pay"]) => {
                Response::new(405, "Method Not Allowed", "use GET /orders/N or POST /orders/N/pay")
            }
            _ => Response::new(404, "Not Found", "an order has a number"),
        }
    }
}

fn lock_name(number: u64) -> String {
    format!("order:{number}")
}

fn unavailable(error: impl ToString) -> Response {
    Response::new(503, "Service Unavailable", error).header("Retry-After: 5")
}

/// Takes the place of a database that all backends share.
#[derive(Default)]
struct Orders {
    orders: Mutex<BTreeMap<u64, Order>>,
}

#[derive(Default)]
struct Order {
    paid_under: Option<FencingToken>,
    payments: u32,
    in_progress: u32,
    /// The most payments of this order that were ever in progress at once.
    in_progress_max: u32,
}

impl Orders {
    fn with<T>(&self, number: u64, access: impl FnOnce(&mut Order) -> T) -> T {
        access(self.orders.lock().entry(number).or_default())
    }
}

impl Order {
    fn begin_payment(&mut self) {
        self.in_progress += 1;
        self.in_progress_max = self.in_progress_max.max(self.in_progress);
    }

    fn end_payment(&mut self) {
        self.in_progress -= 1;
    }
}

fn listen(addr: &str) -> Result {
    let cleanup = Cleanup::start()?;
    let server = Server::from_env_or_start(&cleanup)?;
    let backend = Backend::new(server.config(), Arc::default())?;
    let listener =
        TcpListener::bind(addr).map_err(|error| format!("cannot listen on {addr}: {error}"))?;
    let addr = listener.local_addr()?;
    println!("Lock server: {}", server.description());
    println!("Listening on http://{addr}\n");
    println!("A payment takes {PAYMENT_DURATION:?}. Try two payments of one order at once:\n");
    println!(
        "    curl -X POST http://{addr}/orders/42/pay & curl -X POST http://{addr}/orders/42/pay\n"
    );
    http::serve(&listener, |request| backend.handle(request));
    Ok(())
}

/// Sends many requests to two backends at once, and checks that the backends never handle one order
/// at the same time.
fn self_test() -> Result {
    const ORDERS: u64 = 4;
    const REQUESTS_PER_ORDER: usize = 6;
    let cleanup = Cleanup::start()?;
    let server = Server::from_env_or_start(&cleanup)?;
    println!("Lock server: {}", server.description());
    let orders: Arc<Orders> = Arc::default();
    let addrs =
        [start_backend(server.config(), &orders)?, start_backend(server.config(), &orders)?];
    let total = ORDERS as usize * REQUESTS_PER_ORDER;
    println!(
        "{total} requests at once to two backends, {REQUESTS_PER_ORDER} for each of {ORDERS} \
         orders\n"
    );

    let responses = thread::scope(|threads| {
        let requests: Vec<_> = (0..REQUESTS_PER_ORDER)
            .flat_map(|index| (1..=ORDERS).map(move |number| (addrs[index % addrs.len()], number)))
            .map(|(addr, number)| {
                threads.spawn(move || {
                    (number, http::send(addr, "POST", &format!("/orders/{number}/pay")))
                })
            })
            .collect();
        let join = |request: thread::ScopedJoinHandle<'_, _>| {
            request.join().map_err(|_| "a request panicked")
        };
        requests.into_iter().map(join).collect::<std::result::Result<Vec<_>, _>>()
    })?;
    let mut conflict = None;
    for number in 1..=ORDERS {
        let (mut paid, mut already_paid, mut conflicts) = (0, 0, 0);
        for (_, response) in responses.iter().filter(|(order, _)| *order == number) {
            match response.as_ref().map_err(ToString::to_string)? {
                (200, body) if body.contains("is paid") => paid += 1,
                (200, _) => already_paid += 1,
                (409, body) => {
                    conflicts += 1;
                    conflict = Some(body);
                }
                (status, body) => {
                    return Err(format!("unexpected response, {status}: {body}").into());
                }
            }
        }
        let (payments, at_once) =
            orders.with(number, |order| (order.payments, order.in_progress_max));
        println!(
            "order {number}: handled by at most {at_once} at once; {paid} paid, {already_paid} \
             already \
             paid, {conflicts} conflicts"
        );
        ensure(at_once == 1, "no order is handled twice at once")?;
        ensure((payments, paid) == (1, 1), "each order is paid once")?;
    }
    let conflict =
        conflict.ok_or("no two requests for one order met, so the test shows nothing")?;
    println!("\n409: {}", conflict.trim());

    let unused_addr = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let disconnected = start_backend(Config::new(format!("redis://{unused_addr}")), &orders)?;
    for (addr, method, path, expected) in [
        (disconnected, "POST", "/orders/7/pay", 503),
        (addrs[0], "GET", "/orders/1", 200),
        (addrs[0], "GET", "/orders/1/pay", 405),
        (addrs[0], "POST", "/orders/none/pay", 404),
        (addrs[0], "POST", &*http::oversized_path(), 431),
    ] {
        let (status, body) = http::send(addr, method, path)?;
        println!("{status}: {}", body.trim());
        ensure(status == expected, &format!("the response to {method} {path:.20} is {expected}"))?;
    }
    Ok(())
}

/// Starts a backend that runs until the process ends.
fn start_backend(config: Config, orders: &Arc<Orders>) -> Result<SocketAddr> {
    let backend = Backend::new(config, orders.clone())?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let addr = listener.local_addr()?;
    thread::spawn(move || http::serve(&listener, |request| backend.handle(request)));
    Ok(addr)
}
