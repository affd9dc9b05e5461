//! Takes a lock wherever the URL says: `cargo run --features mysql --example either -- URL`, with
//! `redis://…` or `mysql://…`.

use std::{env, error::Error, time::Duration};

use distlock::{Config, LockManager, MySqlConfig, MySqlMgr, RedisMgr};

/// Does not know where the locks are kept.
fn bill(locks: &dyn LockManager, order: &str) -> distlock::Result<u64> {
    let guard = locks.try_lock_for(order, Duration::from_secs(5))?;
    guard.ensure_held()?;
    Ok(guard.fencing_token().as_u64())
}

fn connect(url: &str) -> distlock::Result<Box<dyn LockManager>> {
    if url.starts_with("mysql://") || url.starts_with("mariadb://") {
        let mgr = MySqlMgr::new(MySqlConfig::new(url))?;
        mgr.create_table()?;
        Ok(Box::new(mgr))
    } else {
        Ok(Box::new(RedisMgr::new(Config::new(url))?))
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let url = env::args().nth(1).unwrap_or_else(|| "redis://127.0.0.1:6379".into());
    let locks = connect(&url)?;
    println!("billed order 42 at {} with token {}", locks.server(), bill(&*locks, "orders:42")?);
    locks.shutdown();
    Ok(())
}
