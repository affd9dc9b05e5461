//! What users and operators can observe: holders, queues, events and metrics.

mod events;
mod exporters;
mod inspect;
mod metrics;
