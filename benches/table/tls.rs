//! What TLS costs: a lock over it, and connecting.

use std::{net::SocketAddr, time::Duration};

use distlock::{Config, RedisMgr, Tls};

use crate::{
    Result, Scale,
    blocks::{BLOCK, Totals, lock_and_release},
    measure::{Placement, Times, median, now},
    report::{Figure, micros, number},
    support::{Certificates, RedisServer},
};

pub(crate) fn row(scale: Scale) -> Result<Vec<Figure>> {
    let certificates = Certificates::new();
    let server = RedisServer::builder().tls(certificates.folder(), false).start();
    let secure = || {
        Config::new(format!("rediss://{}", server.tls_addr()))
            .tls(Tls::new().ca_file(certificates.path("ca.crt")))
    };
    let _pinned = Placement::different_cores(&[server.pid()])?;
    let mut figures = requests(&server, secure(), scale)?;
    figures.extend(connecting(&server, server.tls_addr(), &secure, scale)?);
    Ok(figures)
}

fn requests(server: &RedisServer, secure: Config, scale: Scale) -> Result<Vec<Figure>> {
    let blocks = scale.pick(40, 1);
    let [plain, secure] = [RedisMgr::new(Config::new(server.url()))?, RedisMgr::new(secure)?];
    let (mut without, mut with) = (Totals::new(), Totals::new());
    let mut ratios = Vec::new();
    for mgr in [&plain, &secure] {
        drop(mgr.lock("ours")?);
    }
    for block in 0..blocks {
        let mut plain_block = || without.block(|| lock_and_release(&plain));
        let mut secure_block = || with.block(|| lock_and_release(&secure));
        // The order alternates.
        let (plain_p50, secure_p50) = if block % 2 == 0 {
            (plain_block()?, secure_block()?)
        } else {
            let secure_p50 = secure_block()?;
            (plain_block()?, secure_p50)
        };
        ratios.push(secure_p50 / plain_p50);
    }
    Ok(vec![
        Figure::new(
            format!("lock + release over TLS, {} times, p50", blocks * BLOCK),
            micros(with.pair.p50()),
        )
        .compare(micros(without.pair.p50()), "the same without TLS")
        .at_most_raw_times(1.35),
        Figure::new("  median ratio of adjacent blocks", number(median(ratios))),
    ])
}

/// Each connection is measured by the first exchange over it.
fn connecting(
    server: &RedisServer,
    address: SocketAddr,
    secure: &dyn Fn() -> Config,
    scale: Scale,
) -> Result<Vec<Figure>> {
    let rounds = scale.pick(300, 2);
    let (mut plain, mut full, mut resumed) = (Times::new(), Times::new(), Times::new());
    let first_exchange = |mgr: &RedisMgr| -> Result<Duration> {
        let started = now();
        mgr.ping()?;
        Ok(now() - started)
    };
    let again = RedisMgr::new(secure())?;
    again.ping()?;
    for _ in 0..rounds {
        plain.add(first_exchange(&RedisMgr::new(Config::new(server.url()))?)?);
        // Another manager knows no session to resume.
        full.add(first_exchange(&RedisMgr::new(secure())?)?);
        server.kill_clients(&["LADDR", &address.to_string()]);
        resumed.add(first_exchange(&again)?);
    }
    Ok(vec![
        Figure::new("connect over TLS, first exchange included, p50", micros(full.p50()))
            .compare(micros(plain.p50()), "the same without TLS"),
        Figure::new("  resuming a session, p50", micros(resumed.p50()))
            .compare(micros(full.p50()), "without resuming")
            .at_most_raw_times(0.75),
    ])
}
