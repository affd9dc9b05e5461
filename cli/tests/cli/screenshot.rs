//! The screenshot of `distlock top` in the documentation. `make screenshot` writes it to the file
//! that `DISTLOCK_SCREENSHOT` names.

mod svg;

use std::{env, fs};

use crate::{
    helpers::{queue_key, token_key},
    pty::Pty,
    support::RedisServer,
};

/// A lock of a plausible fleet: name, host, ttl and age in seconds, number of waiters.
type FleetLock = (&'static str, &'static str, u64, u64, usize);

const LOCKS: [FleetLock; 24] = [
    ("orders:settle", "pay-2", 30, 41, 17),
    ("inventory:eu-west", "stock-1", 20, 9, 8),
    ("invoices:2025-11", "bill-3", 60, 1_270, 5),
    ("mail:digest", "mail-1", 30, 96, 3),
    ("search:reindex", "search-4", 120, 15_400, 2),
    ("report:nightly", "cron-1", 60, 2_710, 1),
    ("tenant:acme:import", "import-7", 45, 633, 1),
    ("cache:warm", "web-11", 10, 3, 1),
    ("backup:db-main", "cron-1", 300, 7_900, 0),
    ("backup:db-audit", "cron-2", 300, 3_020, 0),
    ("certs:renew", "edge-2", 60, 12, 0),
    ("deploy:shop-api", "ci-runner-5", 90, 214, 0),
    ("export:ledger", "bill-1", 60, 505, 0),
    ("feeds:partners", "feed-2", 30, 77, 0),
    ("geo:tiles:z14", "tiles-9", 40, 1_811, 0),
    ("leader:scheduler", "sched-0", 15, 260_000, 0),
    ("leader:billing", "bill-2", 15, 88_000, 0),
    ("migrate:0042_users", "ci-runner-2", 120, 31, 0),
    ("prices:refresh", "stock-3", 20, 6, 0),
    ("quota:tenant:acme", "web-4", 10, 1, 0),
    ("sessions:sweep", "web-9", 30, 58, 0),
    ("thumbs:batch:7", "media-2", 60, 149, 0),
    ("thumbs:batch:8", "media-5", 60, 122, 0),
    ("webhooks:retry", "hook-1", 20, 18, 0),
];

/// An id in the form that the library generates.
fn id(host: &str, pid: usize) -> String {
    format!("{host}|pid{pid}|tid{pid}|ts1763712345678|67e55044-10b1-426f-9247-{pid:012}")
}

fn now_us(server: &RedisServer) -> u64 {
    let (seconds, micros): (u64, u64) = server.query(&["TIME"]);
    seconds * 1_000_000 + micros
}

/// Sets a lock with this part of its ttl left.
fn set(server: &RedisServer, (name, host, ttl, age, _): FleetLock, pid: usize, left: f64) {
    let key = format!("lock:{name}");
    let left_ms = (ttl as f64 * 1_000.0 * left) as u64;
    server.cli(&["SET", &key, &id(host, pid), "PX", &left_ms.to_string()]);
    server.cli(&["SET", &token_key(name), &(now_us(server) - age * 1_000_000).to_string()]);
}

/// Waits until the screen shows the current locks.
fn wait_for_poll(server: &RedisServer, top: &Pty, round: usize) {
    server.cli(&["SET", "lock:zz", &format!("round-{round}."), "PX", "60000"]);
    top.wait_shown(&format!("round-{round}."));
}

#[test]
fn screenshot_shows_busy_fleet() {
    let server = RedisServer::start();
    let mut top = Pty::start(104, 31, &["top", "--url", &server.url(), "--interval", "200ms"]);
    for (at, lock) in LOCKS.into_iter().enumerate() {
        set(&server, lock, 4_711 + at * 37, 1.0);
        for waiter in 0..lock.4 {
            let entry = format!("1000 distlock:client:none {}", id("web-1", 2_000 + waiter));
            server.cli(&["RPUSH", &queue_key(lock.0), &entry]);
        }
    }
    wait_for_poll(&server, &top, 0);
    for round in 1..=8 {
        for (at, lock) in LOCKS.into_iter().enumerate() {
            // Locks with waiters are handed over now and then. One renewal was late, and one is
            // overdue.
            let handed = if lock.4 > 2 && round % (at + 1) == 0 { round * 3 } else { 0 };
            let left = match (lock.0, round) {
                ("search:reindex", 3) => 0.07,
                ("tenant:acme:import", _) => 1.0 - 0.1 * round as f64,
                ("deploy:shop-api", 7) => 0.46,
                _ => 1.0 - 0.32 * ((at * 7 + round * 3) % 10) as f64 / 10.0,
            };
            let age = if handed > 0 { 1 } else { lock.3 };
            set(&server, (lock.0, lock.1, lock.2, age, lock.4), 4_711 + at * 37 + handed, left);
        }
        wait_for_poll(&server, &top, round);
    }
    server.cli(&["DEL", "lock:zz"]);
    top.wait_gone("round-");
    top.press("\x1b[B\x1b[B");
    top.wait_until("the third is selected", |_| top.selected_row().starts_with(LOCKS[2].0));
    let image =
        top.on_screen(|screen| svg::render(screen, "distlock top: locks, holders and queues"));
    assert!(image.len() < 100_000 && image.starts_with("<svg") && image.ends_with("</svg>\n"));
    for (name, host, ..) in LOCKS {
        assert!(
            image.contains(name) && image.contains(host),
            "{name} is not in the image\n{}",
            top.screen()
        );
    }
    for part in ["#57ab5a", "#d9a53a", "#e5534b", "hand-overs/s"] {
        assert!(image.contains(part), "no {part} in the image\n{}", top.screen());
    }
    assert_eq!(image.matches("<text").count(), image.matches("</text>").count());
    if let Some(file) = env::var_os("DISTLOCK_SCREENSHOT") {
        fs::write(file, image).unwrap();
    }
}
