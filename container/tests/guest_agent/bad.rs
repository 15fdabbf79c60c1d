//! Malicious agents: requests to them must fail as fast as without an agent.

use std::path::Path;
use std::time::{Duration, Instant};

use container::agent::{Agent, AgentError};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixListener;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::task::JoinHandle;

use super::{PATIENCE, temporary_socket};

type Reader = BufReader<OwnedReadHalf>;

/// The next request, without the `0xff` that may precede it.
async fn heard(reader: &mut Reader) -> Option<Value> {
    let mut line = Vec::new();
    let count = reader.read_until(b'\n', &mut line).await.ok()?;
    let start = usize::from(line.first() == Some(&0xff));
    (count > 0).then(|| serde_json::from_slice(&line[start..]).expect("we ask in JSON"))
}

/// Answers a sync request.
async fn sync(reader: &mut Reader, writer: &mut OwnedWriteHalf) -> Option<()> {
    let question = heard(reader).await?;
    assert_eq!(question["execute"], "guest-sync-delimited");
    let answer = format!("{}\n", json!({ "return": question["arguments"]["id"] }));
    writer.write_all(&[&b"\xff"[..], answer.as_bytes()].concat()).await.ok()
}

/// An agent that handles each connection with this function.
fn serve<F>(socket: &Path, how: fn(Reader, OwnedWriteHalf) -> F) -> JoinHandle<()>
where
    F: Future<Output = Option<()>> + Send + 'static,
{
    let listener = UnixListener::bind(socket).expect("a socket");
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.expect("a connection");
            let (read, write) = stream.into_split();
            how(BufReader::new(read), write).await;
        }
    })
}

/// Reads requests and never answers.
async fn mute(mut reader: Reader, _writer: OwnedWriteHalf) -> Option<()> {
    while heard(&mut reader).await.is_some() {}
    None
}

/// Does not even read.
async fn deaf(reader: Reader, writer: OwnedWriteHalf) -> Option<()> {
    tokio::time::sleep(PATIENCE).await;
    drop((reader, writer));
    None
}

/// Sends endless answers with wrong numbers.
async fn guesses(_reader: Reader, mut writer: OwnedWriteHalf) -> Option<()> {
    let mut number = 0_u64;
    loop {
        let line = format!("{}\n", json!({ "return": number }));
        writer.write_all(&[&b"\xff"[..], line.as_bytes()].concat()).await.ok()?;
        number += 1;
    }
}

/// Sends an endless answer.
async fn babbles(mut reader: Reader, mut writer: OwnedWriteHalf) -> Option<()> {
    sync(&mut reader, &mut writer).await?;
    heard(&mut reader).await?;
    writer.write_all(b"{\"return\": \"").await.ok()?;
    loop {
        writer.write_all(&[b'x'; 4096]).await.ok()?;
    }
}

/// Disconnects in the middle of an answer.
async fn leaves(mut reader: Reader, mut writer: OwnedWriteHalf) -> Option<()> {
    sync(&mut reader, &mut writer).await?;
    heard(&mut reader).await?;
    writer.write_all(b"{\"return\": ").await.ok()
}

/// Sends invalid JSON.
async fn raves(mut reader: Reader, mut writer: OwnedWriteHalf) -> Option<()> {
    sync(&mut reader, &mut writer).await?;
    heard(&mut reader).await?;
    writer.write_all(&[b'['; 1000]).await.ok()?;
    writer.write_all(b"\n").await.ok()
}

/// Answers one byte at a time.
async fn drips(mut reader: Reader, mut writer: OwnedWriteHalf) -> Option<()> {
    sync(&mut reader, &mut writer).await?;
    heard(&mut reader).await?;
    loop {
        writer.write_all(b" ").await.ok()?;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn a_misbehaving_agent_times_out() {
    macro_rules! each {
        ($($how:ident)+) => { tokio::join!($(async {
            let (_folder, socket) = temporary_socket();
            let served = serve(&socket, $how);
            let agent = Agent::new(socket);
            let start = Instant::now();
            let asked = agent.ask("guest-ping", Value::Null).await;
            assert!(matches!(asked, Err(AgentError::Absent(_))), "{}: {asked:?}", stringify!($how));
            assert!(!agent.answers());
            assert!(start.elapsed() < PATIENCE / 2, "{}", stringify!($how));
            // Disconnecting agents must not count as a successful shutdown, either.
            let down = tokio::time::timeout(PATIENCE / 2, agent.shut_down()).await;
            assert!(down.is_ok(), "{}", stringify!($how));
            served.abort();
        }),+) };
    }
    each!(mute deaf guesses babbles leaves raves drips);
}

/// Answers the first request only after the second one, like a suspended agent.
async fn late(mut reader: Reader, mut writer: OwnedWriteHalf) -> Option<()> {
    sync(&mut reader, &mut writer).await?;
    heard(&mut reader).await?;
    // The late answer to the first request comes with the second one.
    let question = heard(&mut reader).await?;
    writer.write_all(b"{\"return\": \"stale\"}\n").await.ok()?;
    let answer = format!("{}\n", json!({ "return": question["arguments"]["id"] }));
    writer.write_all(&[&b"\xff"[..], answer.as_bytes()].concat()).await.ok()?;
    heard(&mut reader).await?;
    writer.write_all(b"{\"return\": \"fresh\"}\n").await.ok()?;
    heard(&mut reader).await.map(drop)
}

#[tokio::test]
async fn a_late_answer_is_not_taken_for_the_next_one() {
    let (_folder, socket) = temporary_socket();
    let _served = serve(&socket, late);
    let agent = Agent::new(socket);
    let given_up = agent.ask("guest-info", Value::Null);
    assert!(tokio::time::timeout(Duration::from_secs(1), given_up).await.is_err());
    assert_eq!(agent.ask("guest-ping", Value::Null).await.unwrap(), "fresh");
}

/// Shuts down without an answer, as the protocol specifies.
async fn obeys(mut reader: Reader, mut writer: OwnedWriteHalf) -> Option<()> {
    sync(&mut reader, &mut writer).await?;
    let question = heard(&mut reader).await?;
    assert_eq!(question["execute"], "guest-shutdown");
    assert_eq!(question["arguments"]["mode"], "powerdown");
    heard(&mut reader).await.map(drop)
}

#[tokio::test]
async fn a_shutdown_needs_no_answer() {
    let (_folder, socket) = temporary_socket();
    let _served = serve(&socket, obeys);
    Agent::new(socket).shut_down().await.unwrap();
}
