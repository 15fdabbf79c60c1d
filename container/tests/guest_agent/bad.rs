//! Agents that mean no good: nobody waits for them longer than for one that is not there.

use std::path::Path;
use std::time::{Duration, Instant};

use container::agent::{Agent, Lack};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixListener;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::task::JoinHandle;

use super::{PATIENCE, place};

type Reader = BufReader<OwnedReadHalf>;

/// The next question, without the byte that may stand before it.
async fn heard(reader: &mut Reader) -> Option<Value> {
    let mut line = Vec::new();
    let count = reader.read_until(b'\n', &mut line).await.ok()?;
    let start = usize::from(line.first() == Some(&0xff));
    (count > 0).then(|| serde_json::from_slice(&line[start..]).expect("we ask in JSON"))
}

/// Answers the question that carries a number.
async fn sync(reader: &mut Reader, writer: &mut OwnedWriteHalf) -> Option<()> {
    let question = heard(reader).await?;
    assert_eq!(question["execute"], "guest-sync-delimited");
    let answer = format!("{}\n", json!({ "return": question["arguments"]["id"] }));
    writer.write_all(&[&b"\xff"[..], answer.as_bytes()].concat()).await.ok()
}

/// An agent that does this with each connection.
fn serve<F>(socket: &Path, how: fn(Reader, OwnedWriteHalf) -> F) -> JoinHandle<()>
where
    F: Future<Output = Option<()>> + Send + 'static,
{
    let listener = UnixListener::bind(socket).expect("a socket");
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.expect("somebody comes");
            let (read, write) = stream.into_split();
            how(BufReader::new(read), write).await;
        }
    })
}

/// Hears, and says nothing.
async fn mute(mut reader: Reader, _writer: OwnedWriteHalf) -> Option<()> {
    while heard(&mut reader).await.is_some() {}
    None
}

/// Does not even hear.
async fn deaf(reader: Reader, writer: OwnedWriteHalf) -> Option<()> {
    tokio::time::sleep(PATIENCE).await;
    drop((reader, writer));
    None
}

/// Answers with any number but ours, without end.
async fn guesses(_reader: Reader, mut writer: OwnedWriteHalf) -> Option<()> {
    let mut number = 0_u64;
    loop {
        let line = format!("{}\n", json!({ "return": number }));
        writer.write_all(&[&b"\xff"[..], line.as_bytes()].concat()).await.ok()?;
        number += 1;
    }
}

/// Begins an answer that has no end.
async fn babbles(mut reader: Reader, mut writer: OwnedWriteHalf) -> Option<()> {
    sync(&mut reader, &mut writer).await?;
    heard(&mut reader).await?;
    writer.write_all(b"{\"return\": \"").await.ok()?;
    loop {
        writer.write_all(&[b'x'; 4096]).await.ok()?;
    }
}

/// Leaves in the middle of an answer.
async fn leaves(mut reader: Reader, mut writer: OwnedWriteHalf) -> Option<()> {
    sync(&mut reader, &mut writer).await?;
    heard(&mut reader).await?;
    writer.write_all(b"{\"return\": ").await.ok()
}

/// Says what is no answer.
async fn raves(mut reader: Reader, mut writer: OwnedWriteHalf) -> Option<()> {
    sync(&mut reader, &mut writer).await?;
    heard(&mut reader).await?;
    writer.write_all(&[b'['; 1000]).await.ok()?;
    writer.write_all(b"\n").await.ok()
}

/// Answers a letter at a time.
async fn drips(mut reader: Reader, mut writer: OwnedWriteHalf) -> Option<()> {
    sync(&mut reader, &mut writer).await?;
    heard(&mut reader).await?;
    loop {
        writer.write_all(b" ").await.ok()?;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn nobody_waits_for_one_that_means_no_good() {
    macro_rules! each {
        ($($how:ident)+) => { tokio::join!($(async {
            let (_folder, socket) = place();
            let served = serve(&socket, $how);
            let agent = Agent::new(socket);
            let start = Instant::now();
            let asked = agent.ask("guest-ping", Value::Null).await;
            assert!(matches!(asked, Err(Lack::Absent(_))), "{}: {asked:?}", stringify!($how));
            assert!(!agent.answers());
            assert!(start.elapsed() < PATIENCE / 2, "{}", stringify!($how));
            // It does not count as one that shuts down, either.
            let down = tokio::time::timeout(PATIENCE / 2, agent.shut_down()).await;
            assert!(down.is_ok(), "{}", stringify!($how));
            served.abort();
        }),+) };
    }
    each!(mute deaf guesses babbles leaves raves drips);
}

/// Answers the first question only when there is a second one, as one does that was suspended.
async fn late(mut reader: Reader, mut writer: OwnedWriteHalf) -> Option<()> {
    sync(&mut reader, &mut writer).await?;
    heard(&mut reader).await?;
    // What it should have said then comes with what is asked now.
    let question = heard(&mut reader).await?;
    writer.write_all(b"{\"return\": \"stale\"}\n").await.ok()?;
    let answer = format!("{}\n", json!({ "return": question["arguments"]["id"] }));
    writer.write_all(&[&b"\xff"[..], answer.as_bytes()].concat()).await.ok()?;
    heard(&mut reader).await?;
    writer.write_all(b"{\"return\": \"fresh\"}\n").await.ok()?;
    heard(&mut reader).await.map(drop)
}

#[tokio::test]
async fn an_answer_that_comes_late_is_not_taken_for_another() {
    let (_folder, socket) = place();
    let _served = serve(&socket, late);
    let agent = Agent::new(socket);
    let given_up = agent.ask("guest-info", Value::Null);
    assert!(tokio::time::timeout(Duration::from_secs(1), given_up).await.is_err());
    assert_eq!(agent.ask("guest-ping", Value::Null).await.unwrap(), "fresh");
}

/// Shuts down, and says nothing of it, as the protocol has it.
async fn obeys(mut reader: Reader, mut writer: OwnedWriteHalf) -> Option<()> {
    sync(&mut reader, &mut writer).await?;
    let question = heard(&mut reader).await?;
    assert_eq!(question["execute"], "guest-shutdown");
    assert_eq!(question["arguments"]["mode"], "powerdown");
    heard(&mut reader).await.map(drop)
}

#[tokio::test]
async fn one_that_shuts_down_need_not_say_so() {
    let (_folder, socket) = place();
    let _served = serve(&socket, obeys);
    Agent::new(socket).shut_down().await.unwrap();
}
