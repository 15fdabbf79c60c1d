//! Threads of their own for slow work.

use std::thread::Builder;

use anyhow::Context as _;
use tokio::sync::oneshot;

/// Browsers are served and signals handled while `work` runs.
pub(super) async fn run_in_thread<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> anyhow::Result<T> + Send + 'static,
) -> anyhow::Result<T> {
    let (sender, result) = oneshot::channel();
    let body = move || {
        // The receiver may be gone.
        sender.send(work()).ok();
    };
    Builder::new().name(name.into()).spawn(body).context("threads")?;
    result.await.context("a thread that broke")?
}
