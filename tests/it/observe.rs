//! What users and operators can observe: holders, queues, events and metrics.

mod blocking;
mod events;
mod exporters;
mod handlers;
mod inspect;
mod metrics;
mod monitoring;
mod nodes;
mod recorder;
mod reports;
