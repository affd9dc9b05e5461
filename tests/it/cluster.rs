//! Locks in a Redis Cluster: each on the node of its slot, while slots move and nodes fail.

use distlock::{Config, RedisMgr};

use crate::{
    helpers::{SECOND, UnwrapReleased, spawn_call},
    support::{Cluster, TEST_TIMEOUT, eventually},
};

fn config(cluster: &Cluster) -> Config {
    Config::new(cluster.url()).ttl(30 * SECOND)
}

fn manager(cluster: &Cluster) -> RedisMgr {
    RedisMgr::new(config(cluster)).unwrap()
}

#[test]
fn locks_of_all_nodes_are_acquired_and_handed_over() {
    let cluster = Cluster::start(3);
    let (one, other) = (manager(&cluster), manager(&cluster));
    for name in ["a", "b", "c", "d", "{user:1}:cart"] {
        let first = one.lock(name).unwrap();
        assert!(other.try_lock(name).unwrap_err().is_contended());
        let waiting = spawn_call(&other, name, |mgr, name| mgr.lock(name).unwrap());
        eventually("it waits", TEST_TIMEOUT, || {
            one.holder(name).unwrap().unwrap().waiters() == Some(1)
        });
        let token = first.fencing_token();
        first.release().unwrap().unwrap_released();
        let next = waiting.join().unwrap();
        assert!(next.fencing_token() > token);
        next.release().unwrap().unwrap_released();
        assert_eq!(one.holder(name).unwrap(), None);
    }
}
